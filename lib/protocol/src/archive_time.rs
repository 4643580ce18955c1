//! Times in the archives that a guest and a command send each other: a header's field holds whole seconds from 1970 to 2242, a
//! PAX record (POSIX.1-2024, pax, "mtime") all others.

/// Key of the record.
pub const MODIFIED: &str = "mtime";
/// Largest number in a field of 11 octal digits.
const MOST_SECONDS: i64 = 0o77_777_777_777;

/// What the field holds of a time, and the value of the record if that is not all of it.
pub fn told(seconds: i64, nanoseconds: u32) -> (u64, Option<String>) {
    let field = seconds.clamp(0, MOST_SECONDS);
    let record = (nanoseconds > 0 || field != seconds).then(|| record(seconds, nanoseconds));
    (field.unsigned_abs(), record)
}

/// Seconds with a fraction: it counts away from zero.
fn record(seconds: i64, nanoseconds: u32) -> String {
    if seconds < 0 && nanoseconds > 0 {
        format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds)
    } else {
        format!("{seconds}.{nanoseconds:09}")
    }
}

/// Nanoseconds since the epoch of a record's value.
pub fn of_record(text: &str) -> Option<i64> {
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let fraction = i64::from(digits.parse::<u32>().ok()?);
    let total = seconds.parse::<i64>().ok()?.saturating_mul(1_000_000_000).saturating_add(fraction);
    Some(if negative { -total } else { total })
}

/// Nanoseconds since the epoch of a header's field. In binary, as GNU has it, it may be negative: a reader that knows only
/// numbers without sign has the same 64 bits.
pub fn of_field(field: u64) -> i64 {
    field.cast_signed().saturating_mul(1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_told_by_the_field_where_it_can_hold_it() {
        assert_eq!(told(1_700_000_000, 0), (1_700_000_000, None));
        assert_eq!(told(5, 500_000_000), (5, Some("5.500000000".to_owned())));
        assert_eq!(told(-2, 250_000_000), (0, Some("-1.750000000".to_owned())));
        assert_eq!(told(MOST_SECONDS + 1, 0).0, MOST_SECONDS.unsigned_abs());
    }

    #[test]
    fn times_survive_also_before_the_epoch_and_long_after_it() {
        for (seconds, nanoseconds) in [
            (0, 1),
            (5, 0),
            (1_700_000_000, 123_456_789),
            (-1, 500_000_000),
            (-7, 0),
            (-2, 1),
            (9_000_000_000, 0),
        ] {
            let (field, record) = told(seconds, nanoseconds);
            let heard = record.map_or(Some(of_field(field)), |record| of_record(&record));
            assert_eq!(heard, Some(seconds * 1_000_000_000 + i64::from(nanoseconds)));
        }
        assert_eq!(of_field((-7_i64).cast_unsigned()), -7_000_000_000);
    }

    #[test]
    fn a_record_may_have_fewer_digits_and_must_be_a_number() {
        assert_eq!(of_record("12"), Some(12_000_000_000));
        assert_eq!(of_record("1.5"), Some(1_500_000_000));
        assert_eq!(of_record("-0.5"), Some(-500_000_000));
        assert_eq!(of_record("9223372036854775807"), Some(i64::MAX));
        for text in ["", "x", "1.x", "99999999999999999999"] {
            assert_eq!(of_record(text), None, "{text}");
        }
    }
}
