//! Values as people write them: sizes, durations, processors, times.

use std::time::{Duration, SystemTime};

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    #[error("write a number of bytes, or one with k, m, g or t behind it, as in 512m")]
    Bytes,
    #[error("write seconds, or numbers with ms, s, m or h behind them, as in 90s or 1h30m")]
    Duration,
    #[error(
        "write a time like 2025-01-31T12:00:00Z or 2025-01-31, seconds since 1970, or how long ago, as in 10m"
    )]
    Time,
    #[error("write a number of processors from 0.01 to 255, as in 1.5")]
    Cpus,
    #[error("write a whole number, 0 or more")]
    Number,
}

/// Bytes in powers of 1024: "512m", "1.5g", "2GiB".
pub(crate) fn bytes(text: &str) -> Result<u64, Error> {
    imp_runtime::spec::bytes(text).map_err(|_| Error::Bytes)
}

/// Seconds when no unit is written.
pub(crate) fn duration(text: &str) -> Result<Duration, Error> {
    let text = text.trim();
    if let Some(seconds) = seconds(text) {
        return Ok(seconds);
    }
    let span: SignedDuration = text.parse().map_err(|_| Error::Duration)?;
    Duration::try_from(span).map_err(|_| Error::Duration)
}

/// An instant, as docker takes it, or how long before `now` it was. One without a zone is in UTC, as all that is shown.
pub(crate) fn time(text: &str, now: SystemTime) -> Result<SystemTime, Error> {
    if let Some(seconds) = seconds(text) {
        return SystemTime::UNIX_EPOCH.checked_add(seconds).ok_or(Error::Time);
    }
    let without_zone = || text.parse::<DateTime>()?.to_zoned(TimeZone::UTC).map(|time| time.timestamp());
    if let Ok(timestamp) = text.parse::<Timestamp>().or_else(|_| without_zone()) {
        return Ok(timestamp.into());
    }
    let ago = duration(text).map_err(|_| Error::Time)?;
    now.checked_sub(ago).ok_or(Error::Time)
}

pub(crate) fn number(text: &str) -> Result<u64, Error> {
    text.parse().map_err(|_| Error::Number)
}

/// Thousandths of a processor.
pub(crate) fn cpu_millis(text: &str) -> Result<u32, Error> {
    let number: f64 = text.trim().parse().map_err(|_| Error::Cpus)?;
    if !(0.01..=255.0).contains(&number) {
        return Err(Error::Cpus);
    }
    Ok((number * 1000.0).round() as u32)
}

/// A number without a unit.
fn seconds(text: &str) -> Option<Duration> {
    let plain = text.bytes().all(|letter| letter.is_ascii_digit() || letter == b'.');
    let number: f64 = text.parse().ok().filter(|_| plain)?;
    Duration::try_from_secs_f64(number).ok()
}

/// "1.5 GiB": three digits at the most, in powers of 1024.
pub(crate) fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut shown = "B";
    for unit in UNITS {
        value /= 1024.0;
        shown = unit;
        if value < 1000.0 {
            break;
        }
    }
    if value < 10.0 { format!("{value:.1} {shown}") } else { format!("{value:.0} {shown}") }
}

/// "12 seconds", "3 minutes", "2 days": the largest unit that fits.
pub(crate) fn show_span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    if count == 1 { format!("1 {unit}") } else { format!("{count} {unit}s") }
}

/// RFC 3339 in UTC, to the millisecond.
pub(crate) fn show_time(time: SystemTime) -> String {
    Timestamp::try_from(time)
        .ok()
        .and_then(|time| time.round(jiff::Unit::Millisecond).ok())
        .map_or_else(|| "unknown".to_owned(), |time| format!("{time:.3}"))
}

/// How long ago `time` was, in words.
pub(crate) fn show_age(time: SystemTime, now: SystemTime) -> String {
    format!("{} ago", show_span(now.duration_since(time).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_size_is_answered_with_how_to_write_one() {
        assert_eq!(bytes("1.5g"), Ok(3 << 29));
        assert_eq!(bytes("1x"), Err(Error::Bytes));
    }

    #[test]
    fn durations_and_times_are_read_as_people_write_them() {
        assert_eq!(duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        for bad in ["", "s", "-1", "-1h", "1d", "1e400", "1e4"] {
            assert_eq!(duration(bad), Err(Error::Duration), "{bad}");
        }
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(time("10m", now), Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(400)));
        assert_eq!(time("1970-01-01T00:00:07Z", now), Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(7)));
        let day = Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(86_400));
        for same in ["1970-01-02", "1970-01-02T00:00:00", "1970-01-02T01:00:00+01:00", "86400", "86400.0"] {
            assert_eq!(time(same, now), day, "{same}");
        }
        for bad in ["yesterday", "", "1970-13-01", "1h ago"] {
            assert_eq!(time(bad, now), Err(Error::Time), "{bad}");
        }
    }

    #[test]
    fn processors_may_be_parts() {
        assert_eq!(cpu_millis("1.5"), Ok(1500));
        assert_eq!(cpu_millis("2"), Ok(2000));
        for bad in ["0", "-1", "256", "x", "nan", "inf"] {
            assert_eq!(cpu_millis(bad), Err(Error::Cpus), "{bad}");
        }
    }

    #[test]
    fn what_is_shown_is_short() {
        assert_eq!(show_bytes(17), "17 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes(1023 << 20), "1.0 GiB");
        assert_eq!(show_bytes(300 << 20), "300 MiB");
        assert_eq!(show_span(Duration::from_secs(1)), "1 second");
        assert_eq!(show_span(Duration::from_secs(7200)), "2 hours");
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        assert_eq!(show_time(time), "1970-01-01T00:00:01.500Z");
    }
}
