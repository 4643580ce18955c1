//! `imp inspect`

use std::time::SystemTime;

use clap::Args;
use imp_embedded::report::Usage;
use imp_runtime::status::{
    BalloonFacts, DriverFacts, EnforcedLimit, KernelFacts, LostOutput, NetworkFacts, NotEnforced,
    Outcome as VmOutcome, Stage, VmStatus,
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
    /// Of the VMM, while it lives.
    host_memory: Option<HostMemory>,
    /// What the guest was asked to give back, and what of it is the host's by now.
    balloon: Option<BalloonFacts>,
    driver: DriverFacts,
    kernel: KernelFacts,
    agent_version: Option<String>,
    kernel_release: Option<String>,
    stop_timeout_seconds: f64,
    /// Settings of control groups that hold the whole machine, as they were written.
    limits: Vec<EnforcedLimit>,
    /// What this host could not hold the machine to, and why.
    not_enforced: Vec<NotEnforced>,
    /// Of processes, processor time, disks and network, as they were asked for.
    limits_asked: imp_runtime::spec::Limits,
    /// Output of the program that could not be recorded, as on a full disk.
    lost_output: Option<LostOutput>,
    stages: Vec<Stage>,
}

/// What a VMM takes of its host's memory.
#[derive(Debug, Serialize)]
struct HostMemory {
    resident_bytes: u64,
    /// Of those, pages that this VMM alone has.
    private_bytes: u64,
    /// The others: of its program, and of what several VMs were restored from.
    shared_bytes: u64,
    /// Each page by the number of those who have it.
    proportional_bytes: u64,
}

impl From<Usage> for HostMemory {
    fn from(usage: Usage) -> Self {
        Self {
            resident_bytes: usage.host_resident_bytes,
            private_bytes: usage.host_private_bytes,
            shared_bytes: usage.host_shared_bytes,
            proportional_bytes: usage.host_proportional_bytes,
        }
    }
}

#[derive(Debug, Serialize)]
struct Mount {
    source: String,
    target: String,
    read_only: bool,
}

impl Shown {
    fn new(vm: VmStatus, usage: Option<Usage>, now: SystemTime) -> Self {
        let mounts = vm.mounts.iter().map(|mount| Mount {
            source: mount.source.display().to_string(),
            target: String::from_utf8_lossy(mount.target.as_slice()).into_owned(),
            read_only: mount.access == imp_runtime::spec::MountAccess::ReadOnly,
        });
        let given = usage.as_ref().and_then(|usage| usage.given_bytes);
        let balloon = vm
            .balloon
            .map(|balloon| BalloonFacts { given_bytes: given.unwrap_or(balloon.given_bytes), ..balloon });
        Self {
            listed: ps::Shown::new(&vm, now),
            balloon,
            mounts: mounts.collect(),
            outcome: vm.outcome,
            base_key: vm.base_key,
            cpus: vm.cpus.get(),
            memory_bytes: vm.memory.bytes(),
            disk_bytes: vm.scratch.bytes(),
            network: vm.network,
            vmm_pid: vm.vmm_pid,
            host_memory: usage.map(HostMemory::from),
            driver: vm.driver,
            kernel: vm.kernel,
            agent_version: vm.agent.as_ref().map(|agent| agent.version.clone()),
            kernel_release: vm.agent.map(|agent| agent.kernel_release),
            stop_timeout_seconds: vm.stop_grace.as_secs_f64(),
            limits: vm.limits,
            not_enforced: vm.not_enforced,
            limits_asked: vm.asked,
            lost_output: vm.lost_output,
            stages: vm.stages,
        }
    }
}

impl Inspect {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let (vms, failed) = context.block_on(async {
            let owner = context.owner().await?;
            let (mut vms, mut failed) = (Vec::new(), None);
            for vm in &self.vms {
                let vm = match owner.inspect(vm).await {
                    Ok(vm) => vm,
                    Err(error) => {
                        failed.get_or_insert(error);
                        continue;
                    }
                };
                // One that has ended meanwhile takes nothing any more.
                let usage = match vm.vmm_pid {
                    Some(_) => owner.usage(vec![vm.id.to_string()]).await.ok().and_then(|mut one| one.pop()),
                    None => None,
                };
                vms.push((vm, usage));
            }
            anyhow::Ok((vms, failed))
        })??;
        let now = SystemTime::now();
        output::print(&output::json(
            &vms.into_iter().map(|(vm, usage)| Shown::new(vm, usage, now)).collect::<Vec<_>>(),
        ))?;
        // What was found is shown all the same.
        failed.map_or(Ok(0), |error| Err(error.into()))
    }
}
