//! Whether the kernel measured its timer as it is.
//!
//! A kernel that has nothing else to compare with measures the processor's own timer against the time stamp counter while it
//! boots. Where the machine is emulated, a busy host may take the processor away in the middle: the kernel then has timers
//! that come late by any factor, or none at all, in which case the first sleep never ends. It does not measure again before it
//! boots again.

use std::fs;

/// Timers may come late by a quarter. An early one costs an interrupt more, and is then set again: three of them at the most.
const SLOWEST_PERCENT: u64 = 125;
const FASTEST_PERCENT: u64 = 25;

/// What the kernel believes the timer of its first processor to count in a second; `None` without one that is in use.
fn believed_hz(list: &str) -> Option<u64> {
    let mut lines = list.lines().map(str::trim).skip_while(|line| *line != "Per CPU device: 0").skip(1);
    let name = lines.next()?.strip_prefix("Clock Event Device:")?.trim();
    if name == "<NULL>" {
        return None;
    }
    let device: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    let number = |name: &str| -> Option<u64> {
        device.iter().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    // Ticks are nanoseconds times mult, shifted right by shift.
    let (mult, shift) = (number("mult:")?, number("shift:")?);
    let hz = (u128::from(mult) * 1_000_000_000).checked_shr(u32::try_from(shift).ok()?)?;
    u64::try_from(hz).ok()
}

fn is_right(believed: Option<u64>, real: u64) -> bool {
    let percent = |percent: u64| real.saturating_mul(percent) / 100;
    believed.is_some_and(|hz| (percent(FASTEST_PERCENT)..=percent(SLOWEST_PERCENT)).contains(&hz))
}

#[derive(Debug, thiserror::Error)]
#[error("the kernel takes its timer for one of {believed_hz:?} Hz, and it is one of {real_hz} Hz")]
pub(crate) struct Mistaken {
    believed_hz: Option<u64>,
    real_hz: u64,
}

/// Looks at the timer of this machine, which really counts `real_hz` in a second.
pub(crate) fn look(real_hz: u64) -> Result<(), Mistaken> {
    // A kernel that shows nothing is no reason not to run.
    let Ok(list) = fs::read_to_string("/proc/timer_list") else { return Ok(()) };
    let believed_hz = believed_hz(&list);
    if is_right(believed_hz, real_hz) { Ok(()) } else { Err(Mistaken { believed_hz, real_hz }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(mult: &str) -> String {
        format!(
            "Timer List Version: v0.10\nnow at 660446412 nsecs\n\nTick Device: mode:     1\nBroadcast device\n\
             Clock Event Device: <NULL>\ntick_broadcast_mask: 0\n\nTick Device: mode:     1\nPer CPU device: 0\n\
             Clock Event Device: lapic\n max_delta_ns:   34359875825\n min_delta_ns:   1000\n mult:           {mult}\n \
             shift:          32\n mode:           3\n\nTick Device: mode:     1\nPer CPU device: 1\n\
             Clock Event Device: other\n mult:           7\n shift:          0\n\n"
        )
    }

    #[test]
    fn the_rate_is_that_of_the_first_processor_s_timer() {
        assert_eq!(believed_hz(&list("268435456")), Some(62_500_000));
        assert_eq!(believed_hz(&list("134217728")), Some(31_250_000));
        assert_eq!(believed_hz(&list("x")), None);
        assert_eq!(believed_hz(&list("268435456").replace("lapic", "<NULL>")), None);
        assert_eq!(
            believed_hz("Per CPU device: 0\nClock Event Device: lapic\n mult: 1\n shift: 300\n"),
            None
        );
        assert_eq!(believed_hz(""), None);
    }

    #[test]
    fn none_or_a_late_one_is_wrong_and_a_little_inexact_is_right() {
        let real = 62_500_000;
        for right in [real, real * 9 / 10, real / 3, real * 6 / 5] {
            assert!(is_right(Some(right), real), "{right}");
        }
        for wrong in [None, Some(0), Some(real * 13 / 10), Some(real / 5)] {
            assert!(!is_right(wrong, real), "{wrong:?}");
        }
    }
}
