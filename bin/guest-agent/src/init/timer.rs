//! Whether the kernel measured its timer as it is.
//!
//! A kernel that has nothing else to compare with measures the processor's own timer against the time stamp counter while it
//! boots. Where the machine is emulated, a busy host may take the processor away in the middle: the kernel then has timers
//! that come late by any factor, or none at all, in which case the first sleep never ends. It does not measure again before it
//! boots again.

use std::fs;

/// Timers may come late by a quarter. One that comes early is set again for what is left, several times over.
const SLOWEST_PERCENT: u64 = 125;
const FASTEST_PERCENT: u64 = 50;
/// The device of which the host knows the rate.
const MEASURED: &str = "lapic";

/// What the kernel's list says of the timer of its first processor.
#[derive(Debug, PartialEq, Eq)]
enum Timer {
    Missing,
    /// It counts so often in a second, the kernel believes.
    Measured(u64),
    /// Another one, or a list of another form: nothing to compare with.
    Other,
}

impl Timer {
    fn of(list: &str) -> Self {
        let mut lines = list.lines().map(str::trim).skip_while(|line| *line != "Per CPU device: 0").skip(1);
        let name = lines.next().and_then(|line| line.strip_prefix("Clock Event Device:"));
        match name.map(str::trim) {
            Some("<NULL>") => Self::Missing,
            Some(MEASURED) => {
                let device: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
                believed_hz(&device).map_or(Self::Other, Self::Measured)
            }
            Some(_) | None => Self::Other,
        }
    }

    fn is_right(&self, real_hz: u64) -> bool {
        let percent = |percent: u64| real_hz.saturating_mul(percent) / 100;
        match self {
            Self::Missing => false,
            Self::Measured(hz) => (percent(FASTEST_PERCENT)..=percent(SLOWEST_PERCENT)).contains(hz),
            Self::Other => true,
        }
    }
}

/// Ticks are nanoseconds times `mult`, shifted right by `shift`.
fn believed_hz(device: &[&str]) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        device.iter().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    let (mult, shift) = (number("mult:")?, number("shift:")?);
    let hz = (u128::from(mult) * 1_000_000_000).checked_shr(u32::try_from(shift).ok()?)?;
    u64::try_from(hz).ok()
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Mistaken {
    #[error("its kernel found no timer, because the host took the processor away while it measured")]
    Missing,
    #[error(
        "its kernel takes a timer of {real_hz} Hz for one of {believed_hz} Hz, because the host took the processor away while it \
         measured"
    )]
    Rate { believed_hz: u64, real_hz: u64 },
}

/// Looks at the timer of this machine, which really counts `real_hz` in a second.
pub(crate) fn look(real_hz: u64) -> Result<(), Mistaken> {
    // A kernel that shows nothing is no reason not to run.
    let Ok(list) = fs::read_to_string("/proc/timer_list") else { return Ok(()) };
    match Timer::of(&list) {
        timer if timer.is_right(real_hz) => Ok(()),
        Timer::Measured(believed_hz) => Err(Mistaken::Rate { believed_hz, real_hz }),
        Timer::Missing | Timer::Other => Err(Mistaken::Missing),
    }
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
        assert_eq!(Timer::of(&list("268435456")), Timer::Measured(62_500_000));
        assert_eq!(Timer::of(&list("134217728")), Timer::Measured(31_250_000));
        assert_eq!(Timer::of(&list("268435456").replace("lapic", "<NULL>")), Timer::Missing);
    }

    #[test]
    fn of_another_timer_or_another_kernel_s_list_nothing_is_said() {
        let shifted_out = "Per CPU device: 0\nClock Event Device: lapic\n mult: 1\n shift: 300\n";
        let other = list("268435456").replace("lapic", "pit");
        for list in ["", "Per CPU device: 0", shifted_out, &list("x"), &other] {
            assert_eq!(Timer::of(list), Timer::Other, "{list}");
            assert!(Timer::of(list).is_right(62_500_000));
        }
    }

    #[test]
    fn none_or_a_late_one_is_wrong_and_a_little_inexact_is_right() {
        let real = 62_500_000;
        for right in [real, real * 9 / 10, real * 6 / 10, real * 6 / 5] {
            assert!(Timer::Measured(right).is_right(real), "{right}");
        }
        for wrong in [0, real * 13 / 10, real / 3] {
            assert!(!Timer::Measured(wrong).is_right(real), "{wrong}");
        }
        assert!(!Timer::Missing.is_right(real));
    }
}
