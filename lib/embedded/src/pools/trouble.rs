//! What goes wrong with the VMs of a pool, and when another one is tried.

use std::time::{Duration, Instant};

use super::back_off::{LONGEST, pause};

/// Of one pool, since it was all right.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// In a row.
    failures: u32,
    last: Option<Last>,
}

#[derive(Debug)]
struct Last {
    what: What,
    why: String,
    /// When another VM is tried.
    over: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// No VM was prepared: the next that is shows that it is over.
    NotPrepared,
    /// One that was prepared ended before anybody had it. The next may do so, too: only time shows that it is over.
    Died,
}

/// What a pool is to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Prepare,
    /// Until something changes, or until then.
    Wait(Option<Instant>),
}

impl Trouble {
    pub(super) fn next(&mut self, ready: usize, size: usize, now: Instant) -> Next {
        self.last.take_if(|last| last.what == What::Died && last.over + LONGEST <= now);
        let Some(last) = &self.last else {
            self.failures = 0;
            return if ready < size { Next::Prepare } else { Next::Wait(None) };
        };
        match last.what {
            What::Died if ready >= size => Next::Wait(Some(last.over + LONGEST)),
            What::NotPrepared if ready >= size => Next::Wait(None),
            What::Died | What::NotPrepared if now < last.over => Next::Wait(Some(last.over)),
            What::Died | What::NotPrepared => Next::Prepare,
        }
    }

    pub(super) fn prepared(&mut self) {
        self.last.take_if(|last| last.what == What::NotPrepared);
    }

    pub(super) fn not_prepared(&mut self, why: String, now: Instant, jitter: u8) {
        self.failed(What::NotPrepared, why, now, jitter);
    }

    /// A VM that had waited for so long.
    pub(super) fn died(&mut self, waited: Duration, why: String, now: Instant, jitter: u8) {
        if waited >= LONGEST {
            self.failures = 0;
        }
        self.failed(What::Died, why, now, jitter);
    }

    fn failed(&mut self, what: What, why: String, now: Instant, jitter: u8) {
        self.failures = self.failures.saturating_add(1);
        self.last = Some(Last { what, why, over: now + pause(self.failures, jitter) });
    }

    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    pub(super) fn why(&self) -> Option<String> {
        self.last.as_ref().map(|last| last.why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(10);

    #[test]
    fn vms_that_keep_dying_are_made_ever_more_rarely_and_the_pool_says_why() {
        let (mut trouble, mut now) = (Trouble::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(trouble.next(0, 1, now), Next::Prepare);
            trouble.prepared();
            // Not before it has lasted.
            assert_eq!(trouble.next(1, 1, now) == Next::Wait(None), pauses.is_empty());
            trouble.died(SOON, "it was killed".into(), now, 0);
            let Next::Wait(Some(until)) = trouble.next(0, 1, now) else { panic!("at once") };
            pauses.push((until - now).as_secs());
            assert_eq!(trouble.why().as_deref(), Some("it was killed"));
            now = until;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(trouble.next(0, 1, now), Next::Prepare);
        let Next::Wait(Some(quiet)) = trouble.next(1, 1, now) else { panic!("nobody looks again") };
        assert_eq!(trouble.next(1, 1, quiet), Next::Wait(None));
        assert_eq!((trouble.why(), trouble.failures()), (None, 0));
    }

    #[test]
    fn one_that_dies_after_a_long_wait_is_the_first_to_do_so() {
        let (mut trouble, now) = (Trouble::default(), Instant::now());
        for _ in 0..5 {
            trouble.died(SOON, String::new(), now, 0);
        }
        trouble.died(LONGEST, String::new(), now, 0);
        assert_eq!(trouble.next(0, 1, now), Next::Wait(Some(now + Duration::from_secs(1))));
    }

    #[test]
    fn the_first_vm_that_is_prepared_again_ends_the_trouble_of_preparing() {
        let (mut trouble, now) = (Trouble::default(), Instant::now());
        trouble.not_prepared("no room".into(), now, 0);
        assert!(matches!(trouble.next(0, 2, now), Next::Wait(Some(_))) && trouble.why().is_some());
        trouble.prepared();
        assert_eq!((trouble.next(1, 2, now), trouble.why()), (Next::Prepare, None));
    }
}
