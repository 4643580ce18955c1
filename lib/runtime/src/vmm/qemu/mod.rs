//! QEMU as the virtual machine monitor: with KVM where that really works, by emulation everywhere else.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::snapshot::SnapshotKind;
use super::{BootConfig, Capabilities, Driver, Error, Machine, NetworkLimit, Possible};
use crate::layout::VmLayout;
use crate::process::Process;
use crate::spec::{Balloon, NetworkMode};
use crate::status::{Accelerator, DriverFacts};

mod args;
mod machine;
mod pages;
pub(crate) mod probe;
pub(crate) mod qmp;
pub(crate) mod snapshot;
mod stream;

pub(crate) const NAME: &str = "qemu";
const MIB: u64 = 1 << 20;

pub(crate) struct Qemu {
    program: PathBuf,
    facts: DriverFacts,
    host: args::Host,
}

impl Qemu {
    pub(crate) fn new(found: &probe::Found) -> Self {
        let facts = DriverFacts {
            name: NAME.into(),
            version: found.version.clone(),
            accelerator: found.accelerator(),
            why: found.why(),
        };
        let host = args::Host { accelerator: facts.accelerator, tsc_khz: found.tsc_khz };
        Self { program: found.program.clone(), facts, host }
    }

    /// For machines that run already; it starts none.
    pub(crate) fn of_the_past(facts: DriverFacts) -> Self {
        let host = args::Host { accelerator: facts.accelerator, tsc_khz: None };
        Self { program: NAME.into(), facts, host }
    }
}

impl Driver for Qemu {
    fn facts(&self) -> &DriverFacts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        // A balloon of QEMU's punches holes into the file behind the guest's memory, on the word of the guest: in a machine that
        // is made of a snapshot that is the snapshot itself.
        Capabilities {
            snapshots: &[SnapshotKind::Full],
            network_limits: Possible::No,
            balloons: Possible::No,
        }
    }

    fn networks(&self) -> &'static [NetworkMode] {
        &[NetworkMode::User, NetworkMode::Bridge]
    }

    fn program(&self) -> &Path {
        &self.program
    }

    fn mark(&self, id: &str) -> String {
        args::name(id)
    }

    fn answer_deadline(&self) -> Duration {
        match self.facts.accelerator {
            Accelerator::Kvm => Duration::from_secs(30),
            // An emulated guest on a busy machine is an order of magnitude slower than on a quiet one.
            Accelerator::Emulation => Duration::from_secs(120),
        }
    }

    fn overhead_bytes(&self) -> u64 {
        match self.facts.accelerator {
            Accelerator::Kvm => 64 * MIB,
            Accelerator::Emulation => 64 * MIB + args::TRANSLATION_CACHE_MIB * MIB,
        }
    }

    fn spawn(&self, boot: &BootConfig, vm: &VmLayout) -> Result<Process, Error> {
        if boot.network.as_ref().is_some_and(|network| network.limit != NetworkLimit::default()) {
            return Err(Error::NoNetworkLimit);
        }
        if boot.balloon == Balloon::With {
            return Err(Error::NoBalloon);
        }
        machine::spawn(&self.program, self.host, boot, vm)
    }

    /// The guest boots when somebody reads its console, which is part of attaching to the machine.
    fn begin<'a>(
        &'a self,
        boot: &'a BootConfig,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>> {
        Box::pin(machine::begin(boot, self.facts.accelerator, vm, process))
    }

    fn adopt<'a>(
        &'a self,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>> {
        Box::pin(machine::adopt(vm, process))
    }
}
