//! Which driver runs a machine: the one that was asked for, or the best that works here.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::firecracker::{self, Firecracker};
use super::memory::Freshness;
use super::qemu::{self, Qemu};
use super::snapshot::SnapshotKind;
use super::{Driver, Possible, find_program};
use crate::layout::Layout;
use crate::spec::{Balloon, Limits, NetworkMode};
use crate::status::DriverFacts;

const QEMU: &str = "qemu-system-x86_64";

/// What new machines are to run in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverChoice {
    /// Firecracker where it runs guests, QEMU elsewhere, and for what Firecracker cannot do.
    #[default]
    Auto,
    Firecracker,
    Qemu,
}

impl DriverChoice {
    pub const ALL: [Self; 3] = [Self::Auto, Self::Firecracker, Self::Qemu];

    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Firecracker => "firecracker",
            Self::Qemu => "qemu",
        }
    }

    /// The choice of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }
}

/// Programs that were named.
#[derive(Debug, Clone, Default)]
pub(crate) struct Programs {
    pub firecracker: Option<PathBuf>,
    pub qemu: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("Firecracker was asked for and does not work here")]
    Firecracker(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("QEMU was asked for and does not work here")]
    Qemu(#[source] qemu::probe::Error),
    #[error("there is no way to run a VM on this machine (not in Firecracker: {firecracker})")]
    Neither {
        firecracker: String,
        #[source]
        source: qemu::probe::Error,
    },
}

/// What was found out about both.
pub(crate) struct Trials {
    pub firecracker: Result<firecracker::probe::Found, firecracker::probe::Error>,
    pub qemu: Result<qemu::probe::Found, qemu::probe::Error>,
}

pub(crate) async fn try_firecracker(
    programs: &Programs,
    layout: &Layout,
    freshness: Freshness,
) -> Result<firecracker::probe::Found, firecracker::probe::Error> {
    let program = firecracker::program::find(programs.firecracker.as_deref());
    let program = program.ok_or(firecracker::probe::Error::NotInstalled)?;
    firecracker::probe::probe(&program, &layout.firecracker_probe(), freshness).await
}

pub(crate) async fn try_qemu(
    programs: &Programs,
    layout: &Layout,
    freshness: Freshness,
) -> Result<qemu::probe::Found, qemu::probe::Error> {
    let program = programs.qemu.clone().or_else(|| find_program(QEMU));
    let program = program.ok_or_else(|| qemu::probe::Error::NotInstalled { name: QEMU.into() })?;
    qemu::probe::probe(&program, &layout.probes(), freshness).await
}

/// As whom this process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    Root,
    Ordinary,
}

impl User {
    pub(crate) fn of_this_process() -> Self {
        if rustix::process::geteuid().is_root() { Self::Root } else { Self::Ordinary }
    }
}

/// The drivers for new machines, the best first; not empty.
#[derive(Clone)]
pub(crate) struct Drivers(Vec<Arc<dyn Driver>>);

impl Drivers {
    pub(crate) async fn find(
        choice: DriverChoice,
        programs: &Programs,
        layout: &Layout,
    ) -> Result<Self, Error> {
        let freshness = Freshness::Remembered;
        match choice {
            DriverChoice::Firecracker => {
                let found = try_firecracker(programs, layout, freshness).await;
                let found = found.map_err(|error| Error::Firecracker(Box::new(error)))?;
                Ok(Self(vec![Arc::new(Firecracker::new(&found))]))
            }
            DriverChoice::Qemu => {
                let found = try_qemu(programs, layout, freshness).await.map_err(Error::Qemu)?;
                Ok(Self(vec![Arc::new(Qemu::new(&found))]))
            }
            DriverChoice::Auto => Self::best(Trials {
                firecracker: try_firecracker(programs, layout, freshness).await,
                qemu: try_qemu(programs, layout, freshness).await,
            }),
        }
    }

    fn best(trials: Trials) -> Result<Self, Error> {
        let mut all: Vec<Arc<dyn Driver>> = Vec::new();
        match (trials.firecracker, trials.qemu) {
            (Err(error), Err(source)) => {
                return Err(Error::Neither { firecracker: crate::vm::chain(&error), source });
            }
            (firecracker, qemu) => {
                if let Ok(found) = firecracker {
                    all.push(Arc::new(Firecracker::new(&found)));
                }
                if let Ok(found) = qemu {
                    all.push(Arc::new(Qemu::new(&found)));
                }
            }
        }
        Ok(Self(all))
    }

    /// The best that can attach a machine to this network, keep these limits and have this balloon, or the best of all, which
    /// then says why it cannot.
    pub(crate) fn for_new(
        &self,
        network: Option<NetworkMode>,
        limits: &Limits,
        balloon: Balloon,
        user: User,
    ) -> Arc<dyn Driver> {
        let possible = |mode: NetworkMode| mode != NetworkMode::Bridge || user == User::Root;
        let can = |driver: &&Arc<dyn Driver>| match network {
            Some(NetworkMode::None) => true,
            Some(mode) => driver.networks().contains(&mode),
            None => driver.networks().iter().any(|mode| possible(*mode)),
        };
        let keeps = |driver: &&Arc<dyn Driver>| {
            !limits.limits_network() || driver.capabilities().network_limits == Possible::Yes
        };
        let has = |driver: &&Arc<dyn Driver>| {
            balloon == Balloon::Without || driver.capabilities().balloons == Possible::Yes
        };
        let best = self.0.iter().find(|driver| can(driver) && keeps(driver) && has(driver));
        let best = best.or_else(|| self.0.first());
        Arc::clone(best.expect("there is at least one driver"))
    }

    /// Whether some driver has balloons.
    pub(crate) fn have_balloons(&self) -> bool {
        self.0.iter().any(|driver| driver.capabilities().balloons == Possible::Yes)
    }

    /// Whether snapshots are made by some driver.
    pub(crate) fn make_snapshots(&self) -> bool {
        self.0.iter().any(|driver| driver.capabilities().snapshots.contains(&SnapshotKind::Full))
    }

    /// One that starts new machines.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<dyn Driver>> {
        self.0.iter().find(|driver| driver.facts().name == name).cloned()
    }

    /// All that some driver can attach a machine to.
    pub(crate) fn networks(&self) -> Vec<NetworkMode> {
        let mut networks = Vec::new();
        for network in self.0.iter().flat_map(|driver| driver.networks()) {
            if !networks.contains(network) {
                networks.push(*network);
            }
        }
        networks
    }

    /// The one for a machine that was started by another owner, which may have chosen otherwise.
    pub(crate) fn of(&self, facts: &DriverFacts) -> Arc<dyn Driver> {
        let known = self.0.iter().find(|driver| driver.facts().name == facts.name);
        match known {
            Some(driver) => Arc::clone(driver),
            None if facts.name == firecracker::NAME => Arc::new(Firecracker::of_the_past(facts.clone())),
            None => Arc::new(Qemu::of_the_past(facts.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::firecracker::version::Version;

    fn firecracker_works() -> Result<firecracker::probe::Found, firecracker::probe::Error> {
        let version = Version { major: 1, minor: 12, patch: 1 };
        let pace = firecracker::probe::Pace::Full;
        let jailer = Err("there is none".to_owned());
        Ok(firecracker::probe::Found { program: "/firecracker".into(), version, pace, jailer })
    }

    fn qemu_works() -> Result<qemu::probe::Found, qemu::probe::Error> {
        let (version, kvm) = ("7.2.22".into(), qemu::probe::Kvm::Missing);
        Ok(qemu::probe::Found { program: "/qemu".into(), version, kvm, tsc_khz: None })
    }

    fn names(trials: Trials) -> Vec<String> {
        Drivers::best(trials).unwrap().0.iter().map(|driver| driver.facts().name.clone()).collect()
    }

    #[test]
    fn firecracker_comes_first_where_it_works_and_qemu_elsewhere() {
        let absent = || Err(firecracker::probe::Error::NotInstalled);
        let no_qemu = || Err(qemu::probe::Error::NotInstalled { name: "qemu".into() });
        assert_eq!(
            names(Trials { firecracker: firecracker_works(), qemu: qemu_works() }),
            ["firecracker", "qemu"]
        );
        assert_eq!(names(Trials { firecracker: absent(), qemu: qemu_works() }), ["qemu"]);
        assert_eq!(names(Trials { firecracker: firecracker_works(), qemu: no_qemu() }), ["firecracker"]);
        let neither = Drivers::best(Trials { firecracker: absent(), qemu: no_qemu() }).map(drop).unwrap_err();
        assert!(neither.to_string().contains("IMP_FIRECRACKER"), "{neither}");
    }

    #[test]
    fn a_network_that_the_best_driver_cannot_have_leads_to_the_next() {
        use NetworkMode::{Bridge, None as Nothing, User as Passt};
        let both = Drivers::best(Trials { firecracker: firecracker_works(), qemu: qemu_works() }).unwrap();
        let none = Limits::default();
        for (network, user, expected) in [
            (None, User::Root, "firecracker"),
            (None, User::Ordinary, "qemu"),
            (Some(Nothing), User::Ordinary, "firecracker"),
            (Some(Bridge), User::Root, "firecracker"),
            (Some(Passt), User::Root, "qemu"),
        ] {
            let chosen = both.for_new(network, &none, Balloon::Without, user);
            assert_eq!(chosen.facts().name, expected, "{network:?} {user:?}");
        }
        let absent = Err(qemu::probe::Error::NotInstalled { name: "qemu".into() });
        let one = Drivers::best(Trials { firecracker: firecracker_works(), qemu: absent }).unwrap();
        let chosen = one.for_new(Some(Passt), &none, Balloon::Without, User::Root);
        assert_eq!(chosen.facts().name, "firecracker");
    }

    #[test]
    fn a_limit_of_the_network_or_a_balloon_leads_to_a_driver_that_has_it() {
        let drivers = Drivers(vec![
            Arc::new(Qemu::new(&qemu_works().unwrap())),
            Arc::new(Firecracker::new(&firecracker_works().unwrap())),
        ]);
        let limited = Limits { network_packets_per_second: Some(1), ..Limits::default() };
        let name = |limits: &Limits, balloon| {
            drivers.for_new(None, limits, balloon, User::Root).facts().name.clone()
        };
        let unlimited = Limits::default();
        assert_eq!(name(&unlimited, Balloon::Without), "qemu");
        assert_eq!(name(&limited, Balloon::Without), "firecracker");
        assert_eq!(name(&unlimited, Balloon::With), "firecracker");
    }

    #[test]
    fn a_machine_of_a_driver_that_is_not_there_any_more_is_taken_over_by_its_kind() {
        let trials = Trials {
            firecracker: firecracker_works(),
            qemu: Err(qemu::probe::Error::NotInstalled { name: "qemu".into() }),
        };
        let drivers = Drivers::best(trials).unwrap();
        let mut facts = drivers.0[0].facts().clone();
        facts.version = "1.0.0".into();
        assert_eq!(drivers.of(&facts).facts().version, "1.12.1");
        facts.name = "qemu".into();
        assert_eq!(drivers.of(&facts).facts(), &facts);
    }
}
