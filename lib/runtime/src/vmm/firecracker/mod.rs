//! Firecracker as the virtual machine monitor, where KVM runs guests.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::snapshot::SnapshotKind;
use super::{BootConfig, Capabilities, Driver, Error, Machine, Possible};
use crate::layout::VmLayout;
use crate::process::{self, Process};
use crate::spec::NetworkMode;
use crate::status::{Accelerator, DriverFacts};
use probe::Pace;
use version::Clock;

pub(crate) mod api;
pub(crate) mod channel;
mod config;
mod exit;
pub(crate) mod jail;
mod machine;
pub(crate) mod privileges;
pub(crate) mod probe;
pub(crate) mod program;
mod room;
mod socket;
pub(crate) mod version;

pub(crate) const NAME: &str = "firecracker";
const MIB: u64 = 1 << 20;

pub(crate) struct Firecracker {
    program: PathBuf,
    facts: DriverFacts,
    /// The jailer, if machines are started in jails.
    jailer: Option<PathBuf>,
    clock: Clock,
    pace: Pace,
}

impl Firecracker {
    pub(crate) fn new(found: &probe::Found) -> Self {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let facts = DriverFacts {
            name: NAME.into(),
            version: found.version.to_string(),
            accelerator: Accelerator::Kvm,
            why: "a guest ran in it on /dev/kvm".into(),
        };
        Self {
            program: found.program.clone(),
            facts,
            jailer: found.jailer.clone().ok(),
            clock: found.version.clock(&kernel),
            pace: found.pace,
        }
    }

    /// For machines that run already; it starts none.
    pub(crate) fn of_the_past(facts: DriverFacts) -> Self {
        Self { program: NAME.into(), facts, jailer: None, clock: Clock::Unsaid, pace: Pace::Slow }
    }
}

/// The name of the process, which no other has.
fn mark(id: &str) -> String {
    format!("imp-{id}")
}

impl Driver for Firecracker {
    fn facts(&self) -> &DriverFacts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            snapshots: &[SnapshotKind::Full, SnapshotKind::Changes],
            network_limits: Possible::Yes,
            balloons: Possible::Yes,
        }
    }

    fn networks(&self) -> &'static [NetworkMode] {
        &[NetworkMode::Bridge]
    }

    fn users(&self) -> Option<Range<u32>> {
        self.jailer.is_some().then_some(jail::USERS)
    }

    /// The one that is started first: a jailer becomes Firecracker's parent.
    fn program(&self) -> &Path {
        self.jailer.as_deref().unwrap_or(&self.program)
    }

    fn strays(&self, program: &Path, id: &str) -> Vec<Process> {
        let mark = mark(id);
        let inside = jail::name_inside(&self.program);
        let mut found = process::find(program.as_os_str(), mark.as_ref());
        found.extend(process::find(&inside, mark.as_ref()));
        found
    }

    fn mark(&self, id: &str) -> String {
        mark(id)
    }

    fn answer_deadline(&self) -> Duration {
        match self.pace {
            Pace::Full => Duration::from_secs(60),
            Pace::Slow => Duration::from_secs(180),
        }
    }

    fn overhead_bytes(&self) -> u64 {
        16 * MIB
    }

    fn spawn(&self, boot: &BootConfig, vm: &VmLayout) -> Result<Process, Error> {
        machine::spawn(&self.program, self.jailer.as_deref(), boot, vm)
    }

    fn begin<'a>(
        &'a self,
        boot: &'a BootConfig,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>> {
        Box::pin(machine::begin(boot, self.clock, vm, process))
    }

    fn adopt<'a>(
        &'a self,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>> {
        Box::pin(machine::adopt(vm, process))
    }
}
