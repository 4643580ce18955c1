//! `imp inspect`

use std::time::SystemTime;

use clap::Args;
use imp_runtime::status::{
    DriverFacts, KernelFacts, NetworkFacts, NotEnforced, Outcome as VmOutcome, Stage, VmStatus,
};
use serde::Serialize;

use crate::commands::ps;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Show all that is known of VMs, as JSON
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

/// A VM with everything about it.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    listed: ps::Shown,
    outcome: Option<VmOutcome>,
    base_key: String,
    cpus: u32,
    memory_bytes: u64,
    disk_bytes: u64,
    network: NetworkFacts,
    mounts: Vec<Mount>,
    vmm_pid: Option<u32>,
    driver: DriverFacts,
    kernel: KernelFacts,
    agent_version: Option<String>,
    kernel_release: Option<String>,
    not_enforced: Vec<NotEnforced>,
    stages: Vec<Stage>,
}

#[derive(Debug, Serialize)]
struct Mount {
    source: String,
    target: String,
    read_only: bool,
}

impl Shown {
    fn new(vm: VmStatus, now: SystemTime) -> Self {
        let mounts = vm.mounts.iter().map(|mount| Mount {
            source: mount.source.display().to_string(),
            target: String::from_utf8_lossy(mount.target.as_slice()).into_owned(),
            read_only: mount.access == imp_runtime::spec::MountAccess::ReadOnly,
        });
        Self {
            listed: ps::Shown::new(&vm, now),
            mounts: mounts.collect(),
            outcome: vm.outcome,
            base_key: vm.base_key,
            cpus: vm.cpus.get(),
            memory_bytes: vm.memory.bytes(),
            disk_bytes: vm.scratch.bytes(),
            network: vm.network,
            vmm_pid: vm.vmm_pid,
            driver: vm.driver,
            kernel: vm.kernel,
            agent_version: vm.agent.as_ref().map(|agent| agent.version.clone()),
            kernel_release: vm.agent.map(|agent| agent.kernel_release),
            not_enforced: vm.not_enforced,
            stages: vm.stages,
        }
    }
}

impl Inspect {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let vms = context.block_on(async {
            let owner = context.owner().await?;
            let mut vms = Vec::new();
            for vm in &self.vms {
                vms.push(owner.inspect(vm).await?);
            }
            anyhow::Ok(vms)
        })??;
        let now = SystemTime::now();
        output::print(&output::json(&vms.into_iter().map(|vm| Shown::new(vm, now)).collect::<Vec<_>>()))?;
        Ok(0)
    }
}
