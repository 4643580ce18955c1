//! Whether a request that failed is tried again, and when. Pure: time and chance are arguments.

use std::time::{Duration, SystemTime};

use super::settings::RegistrySettings;

/// How a try ended that brought no answer to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// No connection, a cut connection, or silence.
    Connection,
    /// The registry answered with this status, and maybe a wish for how long to wait.
    Status { code: u16, retry_after: Option<Duration> },
    /// Trying again would bring the same.
    Final,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Again { pause: Duration },
    GiveUp,
}

/// Decides after try number `attempt` (the first is 1). `chance` is between 0 and 1.
pub(super) fn after(failure: Failure, attempt: u32, chance: f64, settings: &RegistrySettings) -> Verdict {
    let wish = match failure {
        Failure::Final => return Verdict::GiveUp,
        Failure::Connection => None,
        Failure::Status { code: 408 | 429 | 500 | 502 | 503 | 504, retry_after } => retry_after,
        Failure::Status { .. } => return Verdict::GiveUp,
    };
    if attempt >= settings.attempts || wish.is_some_and(|wish| wish > settings.longest_pause) {
        return Verdict::GiveUp;
    }
    // Half of the pause is fixed and half is chance, so that many clients that failed together do not come back together.
    let doubled = settings.first_pause.saturating_mul(1 << (attempt - 1).min(10)).min(settings.longest_pause);
    let pause = doubled.mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0);
    Verdict::Again { pause: wish.map_or(pause, |wish| wish.max(pause)) }
}

/// Reads a `Retry-After` header: seconds, or a date.
pub(super) fn retry_after(header: &str, now: SystemTime) -> Option<Duration> {
    let header = header.trim();
    if let Ok(seconds) = header.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(header).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, seconds: Option<u64>) -> Failure {
        Failure::Status { code, retry_after: seconds.map(Duration::from_secs) }
    }

    fn again(milliseconds: u64) -> Verdict {
        Verdict::Again { pause: Duration::from_millis(milliseconds) }
    }

    #[test]
    fn what_may_pass_is_tried_again_after_a_growing_pause() {
        let settings =
            RegistrySettings { first_pause: Duration::from_secs(1), ..RegistrySettings::default() };
        for (failure, attempt, chance, verdict) in [
            (Failure::Connection, 1, 1.0, again(1000)),
            (Failure::Connection, 1, 0.0, again(500)),
            (Failure::Connection, 3, 1.0, again(4000)),
            (Failure::Connection, 5, 1.0, Verdict::GiveUp),
            (Failure::Final, 1, 1.0, Verdict::GiveUp),
            (status(503, None), 2, 1.0, again(2000)),
            (status(429, Some(7)), 1, 1.0, again(7000)),
            (status(429, Some(0)), 1, 1.0, again(1000)),
            (status(429, Some(121)), 1, 1.0, Verdict::GiveUp),
            (status(404, None), 1, 1.0, Verdict::GiveUp),
            (status(401, None), 1, 1.0, Verdict::GiveUp),
            (status(501, None), 1, 1.0, Verdict::GiveUp),
        ] {
            assert_eq!(after(failure, attempt, chance, &settings), verdict, "{failure:?} {attempt} {chance}");
        }
    }

    #[test]
    fn no_pause_is_longer_than_the_longest() {
        let settings = RegistrySettings { attempts: u32::MAX, ..RegistrySettings::default() };
        for attempt in [1, 10, 100, u32::MAX - 1] {
            let Verdict::Again { pause } = after(Failure::Connection, attempt, 1.0, &settings) else {
                panic!()
            };
            assert!(pause <= settings.longest_pause);
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        for (header, expected) in [
            ("120", Some(120)),
            (" 0 ", Some(0)),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("Sun, 06 Nov 1994 08:49:27 GMT", Some(0)),
            ("-1", None),
            ("soon", None),
        ] {
            assert_eq!(retry_after(header, now), expected.map(Duration::from_secs), "{header}");
        }
    }
}
