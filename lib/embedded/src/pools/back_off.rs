//! How long a pool waits before it tries to prepare another VM.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// Doubled with each failure in a row. `jitter`, of 256, is up to a quarter more: pools that failed for the same reason
/// do not come back at the same time.
pub(super) fn pause(failures: u32, jitter: u8) -> Duration {
    let doubled = 2_u32.checked_pow(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    let pause = FIRST.saturating_mul(doubled).min(LONGEST);
    pause + pause * u32::from(jitter) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_doubles_the_pause_up_to_a_minute() {
        let seconds = |failures| pause(failures, 0).as_secs();
        assert_eq!([1, 2, 3, 6, 7, 1000].map(seconds), [1, 2, 4, 32, 60, 60]);
        assert!(pause(1, 255) > pause(1, 0) && pause(1, 255) < Duration::from_millis(1250));
    }
}
