//! Medians of rounds in which the things compared take turns.

use std::time::{Duration, Instant};

/// Runs each of `things` once per round and returns the median time of each. The order turns with every round, so that
/// none always profits from what another left in the caches.
pub(crate) fn alternate<const N: usize>(
    rounds: usize,
    mut things: [&mut dyn FnMut() -> anyhow::Result<Duration>; N],
) -> anyhow::Result<[Duration; N]> {
    let mut times: [Vec<Duration>; N] = std::array::from_fn(|_| Vec::with_capacity(rounds));
    for round in 0..rounds {
        for turn in 0..N {
            let which = (round + turn) % N;
            if let (Some(thing), Some(times)) = (things.get_mut(which), times.get_mut(which)) {
                times.push(thing()?);
            }
        }
    }
    Ok(times.map(median))
}

/// How long `work` takes.
pub(crate) fn time<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_gets_its_own_median_and_the_order_turns() {
        let order = std::cell::RefCell::new(String::new());
        let mut times = [5, 1, 3].into_iter();
        let mut first = || {
            order.borrow_mut().push('a');
            Ok(Duration::from_millis(times.next().unwrap()))
        };
        let mut second = || {
            order.borrow_mut().push('b');
            Ok(Duration::from_millis(9))
        };
        let medians = alternate(3, [&mut first, &mut second]).unwrap();
        assert_eq!(medians, [Duration::from_millis(3), Duration::from_millis(9)]);
        assert_eq!(order.into_inner(), "abbaab");
    }
}
