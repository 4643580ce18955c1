//! Rate of the processor's time stamp counter, measured against the monotonic clock.

use std::time::Duration;

/// Kilohertz of the time stamp counter, measured over at least `span` (50 ms give about 10 ppm on a quiet machine).
/// Blocks for that long. `None` where the processor has no such counter.
pub fn measure_khz(span: Duration) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        let (start_ticks, start) = sample();
        std::thread::sleep(span);
        let (end_ticks, end) = sample();
        let nanoseconds = end.checked_sub(start).filter(|n| *n > 0)?;
        let khz = u128::from(end_ticks.checked_sub(start_ticks)?) * 1_000_000 / u128::from(nanoseconds);
        u64::try_from(khz).ok().filter(|khz| *khz > 0)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = span;
        None
    }
}

/// Ticks and nanoseconds of one moment: of several tries the one in which reading both took the least time, so that a
/// preemption between the two does not count.
#[cfg(target_arch = "x86_64")]
fn sample() -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..16 {
        let before = ticks();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let after = ticks();
        let width = after.saturating_sub(before);
        if width < best.0 {
            let nanoseconds = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
            best = (width, before + width / 2, nanoseconds);
        }
    }
    (best.1, best.2)
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction; Linux lets user programs execute it unless a process asked
    // the kernel to forbid it, and then the process gets a signal, not undefined behaviour.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn two_measurements_agree() {
        let one = measure_khz(Duration::from_millis(20)).unwrap();
        let two = measure_khz(Duration::from_millis(20)).unwrap();
        assert!(one.abs_diff(two) * 100 < one, "{one} {two}");
        assert!((100_000..10_000_000).contains(&one), "{one}");
    }
}
