//! Which request is allowed when, and what a husk becomes: pure.
//!
//! ```text
//! new ─prepare─► dormant ─activate─► active ─┐
//!  └──────────activate─────────────────┘     │ the machine ends
//!                  └── not confirmed ─► ending   └─► ended
//! ```
//!
//! A husk has one machine in its life. One operation is under way at a time, and what comes meanwhile is refused. A
//! preparation or an activation that is late, and an activation that fails, end the husk: nobody knows how far they came.

use imp_runtime::Digest;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lifecycle {
    machine: Machine,
    under_way: Option<Operation>,
    is_ending: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    /// There is none yet.
    New,
    /// Made of this snapshot, loaded and paused.
    Dormant(Digest),
    Active,
    /// It was there.
    Ended,
}

/// A request that changes something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Prepare,
    /// `snapshot`: the one that the request names.
    Activate {
        snapshot: Option<Digest>,
    },
    Fork,
    RemoveFork,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Prepare,
    Activate,
    Fork,
    RemoveFork,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Prepared(Digest),
    /// Nothing is left of what was begun.
    NotPrepared,
    /// The request did not fit the machine, of which nothing was asked.
    Unchanged,
    Activated,
    /// The machine did not confirm that it is one of its own.
    NotActivated,
    /// A snapshot of the machine was made or removed, or not.
    Forked,
}

/// How an activation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    Dormant,
    /// The machine is to be made of this snapshot first.
    Nothing(Digest),
}

/// What a status says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    New,
    Preparing,
    Dormant,
    Activating,
    Active,
    Forking,
    Ended,
    Ending,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("there is no machine yet: prepare one, or name a snapshot_dir")]
    NotPrepared,
    #[error("a machine is prepared already: a husk has one in its life")]
    AlreadyPrepared,
    #[error("the machine is active already")]
    AlreadyActive,
    #[error("the machine is prepared of another snapshot, {}: leave snapshot_dir out, or name that", prepared.short())]
    OtherSnapshot { prepared: Digest },
    #[error("the machine is not active: only one that runs can be forked")]
    NotActive,
    #[error("{} is under way: ask again when it is over", .0.name())]
    Busy(Operation),
    #[error("the machine has ended: end this husk and start another")]
    Ended,
    #[error("the husk is ending")]
    Ending,
}

impl Lifecycle {
    pub(crate) fn new(machine: Machine) -> Self {
        Self { machine, under_way: None, is_ending: false }
    }

    /// Whether an activation may begin, and how.
    pub(crate) fn begin_activation(&mut self, snapshot: Option<Digest>) -> Result<Beginning, Refused> {
        self.begin(Ask::Activate { snapshot })?;
        Ok(match (self.machine, snapshot) {
            (Machine::New, Some(snapshot)) => Beginning::Nothing(snapshot),
            (Machine::New | Machine::Dormant(_) | Machine::Active | Machine::Ended, _) => Beginning::Dormant,
        })
    }

    /// Whether a request may begin. If so it is under way until [`Lifecycle::over`].
    pub(crate) fn begin(&mut self, ask: Ask) -> Result<(), Refused> {
        self.under_way = Some(self.may(ask)?);
        Ok(())
    }

    /// Whether a request could begin now.
    pub(crate) fn may(&self, ask: Ask) -> Result<Operation, Refused> {
        if self.is_ending {
            return Err(Refused::Ending);
        }
        match self.under_way {
            Some(operation) => Err(Refused::Busy(operation)),
            None => self.allowed(ask),
        }
    }

    fn allowed(&self, ask: Ask) -> Result<Operation, Refused> {
        match (ask, self.machine) {
            (Ask::Prepare, Machine::New) => Ok(Operation::Prepare),
            (Ask::Prepare, Machine::Dormant(_)) => Err(Refused::AlreadyPrepared),
            (Ask::Prepare | Ask::Activate { .. }, Machine::Active) => Err(Refused::AlreadyActive),
            (Ask::Activate { snapshot: None }, Machine::New) => Err(Refused::NotPrepared),
            (Ask::Activate { snapshot: Some(_) }, Machine::New) => Ok(Operation::Activate),
            (Ask::Activate { snapshot: Some(named) }, Machine::Dormant(prepared)) if named != prepared => {
                Err(Refused::OtherSnapshot { prepared })
            }
            (Ask::Activate { .. }, Machine::Dormant(_)) => Ok(Operation::Activate),
            (Ask::Fork, Machine::Active) => Ok(Operation::Fork),
            (Ask::Fork, Machine::New | Machine::Dormant(_)) => Err(Refused::NotActive),
            // What was made of a machine outlives it.
            (Ask::RemoveFork, _) => Ok(Operation::RemoveFork),
            (Ask::Prepare | Ask::Activate { .. } | Ask::Fork, Machine::Ended) => Err(Refused::Ended),
        }
    }

    /// What was under way is over.
    pub(crate) fn over(&mut self, outcome: Outcome) {
        self.under_way = None;
        match (outcome, self.machine) {
            (Outcome::NotActivated, _) => self.is_ending = true,
            // It may have ended before anybody could say what it was.
            (Outcome::Prepared(snapshot), Machine::New) => self.machine = Machine::Dormant(snapshot),
            (Outcome::Activated, Machine::New | Machine::Dormant(_)) => self.machine = Machine::Active,
            (
                Outcome::Prepared(_)
                | Outcome::Activated
                | Outcome::NotPrepared
                | Outcome::Unchanged
                | Outcome::Forked,
                _,
            ) => {}
        }
    }

    /// What is under way has taken too long. A fork goes on until it is over, and what it made goes then.
    pub(crate) fn late(&mut self) {
        self.is_ending |= match self.under_way {
            Some(Operation::Prepare | Operation::Activate) => true,
            Some(Operation::Fork | Operation::RemoveFork) | None => false,
        };
    }

    pub(crate) fn machine_ended(&mut self) {
        self.machine = Machine::Ended;
    }

    pub(crate) fn end(&mut self) {
        self.is_ending = true;
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending
    }

    pub(crate) fn state(&self) -> State {
        match (self.is_ending, self.under_way, self.machine) {
            (true, ..) => State::Ending,
            (false, _, Machine::Ended) => State::Ended,
            (false, Some(Operation::Prepare), _) => State::Preparing,
            (false, Some(Operation::Activate), _) => State::Activating,
            (false, Some(Operation::Fork), _) => State::Forking,
            (false, Some(Operation::RemoveFork) | None, Machine::New) => State::New,
            (false, Some(Operation::RemoveFork) | None, Machine::Dormant(_)) => State::Dormant,
            (false, Some(Operation::RemoveFork) | None, Machine::Active) => State::Active,
        }
    }
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Prepare => "a preparation",
            Self::Activate => "an activation",
            Self::Fork => "a snapshot for a fork",
            Self::RemoveFork => "the removal of a fork's snapshot",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Digest = Digest::from_bytes([1; 32]);
    const TWO: Digest = Digest::from_bytes([2; 32]);
    const MACHINES: [Machine; 4] = [Machine::New, Machine::Dormant(ONE), Machine::Active, Machine::Ended];
    const ASKS: [Ask; 6] = [
        Ask::Prepare,
        Ask::Activate { snapshot: None },
        Ask::Activate { snapshot: Some(ONE) },
        Ask::Activate { snapshot: Some(TWO) },
        Ask::Fork,
        Ask::RemoveFork,
    ];

    #[test]
    fn each_request_is_allowed_where_it_means_something_and_refused_by_name_elsewhere() {
        use Operation as O;
        use Refused as R;
        let other = R::OtherSnapshot { prepared: ONE };
        let expected: [[Result<O, R>; 4]; 6] = [
            [Ok(O::Prepare), Err(R::AlreadyPrepared), Err(R::AlreadyActive), Err(R::Ended)],
            [Err(R::NotPrepared), Ok(O::Activate), Err(R::AlreadyActive), Err(R::Ended)],
            [Ok(O::Activate), Ok(O::Activate), Err(R::AlreadyActive), Err(R::Ended)],
            [Ok(O::Activate), Err(other), Err(R::AlreadyActive), Err(R::Ended)],
            [Err(R::NotActive), Err(R::NotActive), Ok(O::Fork), Err(R::Ended)],
            [Ok(O::RemoveFork), Ok(O::RemoveFork), Ok(O::RemoveFork), Ok(O::RemoveFork)],
        ];
        for (ask, row) in ASKS.into_iter().zip(expected) {
            for (machine, expected) in MACHINES.into_iter().zip(row) {
                let mut husk = Lifecycle::new(machine);
                let begun = husk.begin(ask).map(|()| husk.under_way.unwrap());
                assert_eq!(begun, expected, "{ask:?} of {machine:?}");
                if expected.is_err() {
                    assert_eq!(husk, Lifecycle::new(machine), "a refusal changes nothing");
                }
            }
        }
    }

    #[test]
    fn while_one_request_is_under_way_or_the_husk_is_ending_every_other_is_refused() {
        for first in ASKS {
            for machine in MACHINES {
                let mut husk = Lifecycle::new(machine);
                if husk.begin(first).is_err() {
                    continue;
                }
                let operation = husk.under_way.unwrap();
                for second in ASKS {
                    assert_eq!(husk.begin(second), Err(Refused::Busy(operation)));
                }
                husk.end();
                for second in ASKS {
                    assert_eq!(husk.begin(second), Err(Refused::Ending));
                }
            }
        }
    }

    #[test]
    fn a_machine_is_prepared_activated_and_forked_and_says_so() {
        let mut husk = Lifecycle::new(Machine::New);
        let mut states = vec![husk.state()];
        husk.begin(Ask::Prepare).unwrap();
        states.push(husk.state());
        husk.over(Outcome::Prepared(ONE));
        states.push(husk.state());
        assert_eq!(husk.begin_activation(None), Ok(Beginning::Dormant));
        states.push(husk.state());
        husk.over(Outcome::Activated);
        states.push(husk.state());
        husk.begin(Ask::Fork).unwrap();
        states.push(husk.state());
        husk.over(Outcome::Forked);
        states.push(husk.state());
        husk.machine_ended();
        states.push(husk.state());
        use State as S;
        let expected =
            [S::New, S::Preparing, S::Dormant, S::Activating, S::Active, S::Forking, S::Active, S::Ended];
        assert_eq!(states, expected);
    }

    #[test]
    fn an_activation_that_names_a_snapshot_makes_the_machine_first() {
        let mut husk = Lifecycle::new(Machine::New);
        assert_eq!(husk.begin_activation(Some(TWO)), Ok(Beginning::Nothing(TWO)));
        husk.over(Outcome::Activated);
        assert_eq!(husk.state(), State::Active);
    }

    #[test]
    fn what_failed_before_the_machine_was_asked_leaves_the_husk_as_it_was() {
        for (machine, ask, outcome) in [
            (Machine::New, Ask::Prepare, Outcome::NotPrepared),
            (Machine::New, Ask::Activate { snapshot: Some(ONE) }, Outcome::NotPrepared),
            (Machine::Dormant(ONE), Ask::Activate { snapshot: None }, Outcome::Unchanged),
            (Machine::Active, Ask::Fork, Outcome::Forked),
        ] {
            let mut husk = Lifecycle::new(machine);
            husk.begin(ask).unwrap();
            husk.over(outcome);
            assert_eq!(husk, Lifecycle::new(machine), "{ask:?}");
        }
    }

    #[test]
    fn a_machine_that_was_not_confirmed_and_one_that_is_late_end_the_husk_for_good() {
        let mut unconfirmed = Lifecycle::new(Machine::Dormant(ONE));
        unconfirmed.begin(Ask::Activate { snapshot: None }).unwrap();
        unconfirmed.over(Outcome::NotActivated);
        assert!(unconfirmed.is_ending());
        for (machine, ask, ends) in [
            (Machine::New, Ask::Prepare, true),
            (Machine::Dormant(ONE), Ask::Activate { snapshot: None }, true),
            (Machine::Active, Ask::Fork, false),
            (Machine::Active, Ask::RemoveFork, false),
        ] {
            let mut husk = Lifecycle::new(machine);
            husk.begin(ask).unwrap();
            husk.late();
            assert_eq!(husk.is_ending(), ends, "{ask:?}");
            assert!(husk.begin(Ask::RemoveFork).is_err(), "the late one is under way still, or all is over");
        }
    }

    #[test]
    fn a_machine_that_ended_meanwhile_stays_ended_whatever_came_of_the_request() {
        for (machine, ask, outcome) in [
            (Machine::New, Ask::Prepare, Outcome::Prepared(ONE)),
            (Machine::Dormant(ONE), Ask::Activate { snapshot: None }, Outcome::Activated),
            (Machine::Active, Ask::Fork, Outcome::Forked),
        ] {
            let mut husk = Lifecycle::new(machine);
            husk.begin(ask).unwrap();
            husk.machine_ended();
            assert_eq!(husk.state(), State::Ended);
            husk.over(outcome);
            assert_eq!(husk.state(), State::Ended, "{ask:?}");
        }
    }
}
