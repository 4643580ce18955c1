//! The wall clock, set to the host's, and the proof that the monotonic one went on.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the wall clock cannot be set")]
    Set(#[source] std::io::Error),
    #[error("the monotonic clock went backwards, from {} to {} ns", before.as_nanos(), now.as_nanos())]
    Backwards { before: Duration, now: Duration },
}

/// What the host's clock said, and when that was heard.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostTime {
    pub(super) since_epoch: Duration,
    pub(super) heard: Instant,
}

/// `before`: the monotonic clock when the machine fell asleep, if it did.
pub(super) fn repair(host: HostTime, before: Option<Duration>) -> Result<(), Error> {
    let now = host.since_epoch + host.heard.elapsed();
    let time = Timespec { tv_sec: now.as_secs() as i64, tv_nsec: now.subsec_nanos().into() };
    clock_settime(ClockId::Realtime, time).map_err(|error| Error::Set(error.into()))?;
    went_on(before, monotonic())
}

fn went_on(before: Option<Duration>, now: Duration) -> Result<(), Error> {
    match before {
        Some(before) if now < before => Err(Error::Backwards { before, now }),
        Some(_) | None => Ok(()),
    }
}

pub(super) fn monotonic() -> Duration {
    duration(clock_gettime(ClockId::Monotonic))
}

/// Nanoseconds since the epoch.
pub(super) fn wall() -> u64 {
    u64::try_from(duration(clock_gettime(ClockId::Realtime)).as_nanos()).unwrap_or(u64::MAX)
}

fn duration(time: Timespec) -> Duration {
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_monotonic_clock_that_went_backwards_is_told() {
        let [early, late] = [1, 2].map(Duration::from_secs);
        assert!(matches!(went_on(Some(late), early), Err(Error::Backwards { .. })));
        assert!(went_on(Some(early), late).is_ok() && went_on(Some(late), late).is_ok());
        assert!(went_on(None, early).is_ok());
    }
}
