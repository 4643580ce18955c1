//! QEMU as the virtual machine monitor: with KVM where that really works, by emulation everywhere else.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::{BootConfig, Driver, Error, Machine};
use crate::layout::VmLayout;
use crate::process::Process;
use crate::status::{Accelerator, DriverFacts};

mod args;
mod machine;
pub(crate) mod probe;
pub(crate) mod qmp;

const MIB: u64 = 1 << 20;

pub(crate) struct Qemu {
    program: PathBuf,
    facts: DriverFacts,
    host: args::Host,
}

impl Qemu {
    pub(crate) fn new(found: &probe::Found) -> Self {
        let facts = DriverFacts {
            name: "qemu".into(),
            version: found.version.clone(),
            accelerator: found.accelerator(),
            why: found.why(),
        };
        let host = args::Host { accelerator: facts.accelerator, tsc_khz: found.tsc_khz };
        Self { program: found.program.clone(), facts, host }
    }
}

impl Driver for Qemu {
    fn facts(&self) -> &DriverFacts {
        &self.facts
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
        machine::spawn(&self.program, self.host, boot, vm)
    }

    fn attach<'a>(
        &'a self,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>> {
        Box::pin(machine::attach(vm, process))
    }
}
