//! What a machine that goes on from a snapshot repairs, in order, and what came of each.

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use imp_protocol::causes::chain;
use imp_protocol::guest::Repair;
use imp_protocol::guest::repair::Kind;

use super::clock::{self, HostTime};
use super::environment::Inherited;
use super::wanted::Identity;
use super::{connections, entropy, generation, hooks, identity, network};

/// Without these nobody may use the machine.
const ESSENTIAL: [Kind; 3] = [Kind::Entropy, Kind::Clock, Kind::Identity];

/// What the repairs find in the machine.
pub(super) struct Surroundings<'a> {
    pub(super) time: HostTime,
    /// The monotonic clock when the machine fell asleep.
    pub(super) asleep_since: Duration,
    /// Processes that may hold connections.
    pub(super) processes: Vec<u32>,
    pub(super) inherited: &'a Inherited,
    pub(super) null: &'a File,
    pub(super) hooks_cgroup: Option<PathBuf>,
}

#[derive(Debug, Default)]
pub(super) struct Repairs(Vec<Repair>);

impl Repairs {
    /// Makes the machine the one that it is told to be. What fails is told; the rest is done all the same.
    pub(super) fn of_new_machine(identity: &Identity, surroundings: &Surroundings<'_>) -> Self {
        let mut repairs = Self::default();
        repairs.run(Kind::Entropy, || entropy::repair(&identity.entropy));
        repairs.run(Kind::Clock, || clock::repair(surroundings.time, Some(surroundings.asleep_since)));
        repairs.run(Kind::Identity, || {
            identity::repair(&identity.hostname, &identity.names, &identity.machine_id)
        });
        if let Some(interface) = &identity.network {
            repairs.run(Kind::Network, || network::repair(interface));
        }
        repairs.run(Kind::Connections, || connections::repair(&surroundings.processes));
        repairs.run(Kind::Generation, || {
            generation::repair(Path::new(generation::DIRECTORY), &identity.generation)
        });
        surroundings.inherited.add(&identity.variables);
        repairs.run(Kind::Environment, || Ok::<_, std::convert::Infallible>(()));
        let hooks = hooks::Surroundings {
            null: surroundings.null,
            cgroup: surroundings.hooks_cgroup.clone(),
            deadline: Instant::now() + hooks::TIME,
        };
        repairs.run(Kind::Hooks, || {
            let variables = surroundings.inherited.all();
            hooks::repair(Path::new(hooks::DIRECTORY), &identity.generation, &variables, &hooks)
        });
        repairs
    }

    pub(super) fn of_same_machine(time: HostTime, asleep_since: Option<Duration>) -> Self {
        let mut repairs = Self::default();
        repairs.run(Kind::Clock, || clock::repair(time, asleep_since));
        repairs
    }

    fn run<E: Error + 'static>(&mut self, kind: Kind, repair: impl FnOnce() -> Result<(), E>) {
        let began = Instant::now();
        let failed = repair().err().map(|error| chain(&error)).unwrap_or_default();
        let nanoseconds = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0.push(Repair { kind: kind.into(), failed, nanoseconds });
    }

    /// Whether processes may run.
    pub(super) fn are_enough(&self) -> bool {
        let done = |kind| self.0.iter().any(|repair| repair.kind() == kind && repair.failed.is_empty());
        ESSENTIAL.into_iter().all(done)
    }

    pub(super) fn failures(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let failed = self.0.iter().filter(|repair| !repair.failed.is_empty());
        failed.map(|repair| (repair.kind().as_str_name(), repair.failed.as_str()))
    }

    pub(super) fn into_answer(self) -> Vec<Repair> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repairs(kinds: &[Kind], failing: Option<Kind>) -> Repairs {
        let mut repairs = Repairs::default();
        for kind in kinds {
            let fails = Some(*kind) == failing;
            repairs.run(*kind, || if fails { Err(std::io::Error::other("broken")) } else { Ok(()) });
        }
        repairs
    }

    #[test]
    fn processes_run_only_when_all_that_is_essential_is_done() {
        let all = [Kind::Entropy, Kind::Clock, Kind::Identity, Kind::Hooks];
        assert!(repairs(&all, None).are_enough());
        assert!(repairs(&all, Some(Kind::Hooks)).are_enough());
        assert!(!repairs(&all[1..], None).are_enough());
        for kind in ESSENTIAL {
            let repairs = repairs(&all, Some(kind));
            assert!(!repairs.are_enough());
            assert_eq!(repairs.failures().collect::<Vec<_>>(), [(kind.as_str_name(), "broken")]);
        }
    }
}
