//! What an owner reports of its VMs and its machine, as plain types.

use std::time::SystemTime;

use imp_protocol::guest::VitalsResponse;
use imp_protocol::runtime as wire;
use imp_runtime::metering::{self, Memory};
use imp_runtime::{Check, Digest, Verdict};

/// What one VM uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    pub id: String,
    pub name: String,
    /// Absent: the guest does not answer.
    pub guest: Option<GuestUsage>,
    /// Processor time of the VMM since its start.
    pub host_cpu_nanoseconds: u64,
    pub host_resident_bytes: u64,
    /// Pages that only this VMM has, and that are not a snapshot's.
    pub host_private_bytes: u64,
    /// Pages of its program that other processes have, too, and those of the snapshot that the VM is made of.
    pub host_shared_bytes: u64,
    /// Its share of all its pages: a page that three have counts a third.
    pub host_proportional_bytes: u64,
    /// As it is counted where VMs share a snapshot's pages.
    pub host_memory: Memory,
    /// Allocated blocks of the scratch disk.
    pub scratch_bytes: u64,
    /// What the VM was given.
    pub memory_bytes: u64,
    /// What its guest has given back of it, and counts as used. Absent: it has no balloon.
    pub given_bytes: Option<u64>,
}

/// What a guest says of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestUsage {
    pub memory_used_bytes: u64,
    pub network_received_bytes: u64,
    pub network_sent_bytes: u64,
    pub processes: u32,
}

/// A template as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    pub names: Vec<String>,
    /// What VMs are made of.
    pub snapshot: Digest,
    /// Of all that it was made of; absent: a newer one has been made of the same.
    pub template: Option<Digest>,
    /// As whoever made it named it.
    pub image: String,
    /// Program and arguments of its main process.
    pub command: String,
    pub vmm: String,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub scratch_bytes: u64,
    /// On disk.
    pub bytes: u64,
    pub made: SystemTime,
    pub last_used: SystemTime,
    /// Ids of the VMs that map its memory, and others that keep it.
    pub used_by: Vec<String>,
}

/// A VM that is put away on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspended {
    pub name: String,
    pub snapshot: Digest,
    pub image: String,
    pub memory_bytes: u64,
    /// On disk.
    pub bytes: u64,
    pub since: SystemTime,
}

/// A warm pool as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    /// As it was asked for.
    pub template: String,
    pub snapshot: Digest,
    /// VMs that are to wait in it.
    pub size: u32,
    /// VMs that do.
    pub ready: u32,
    /// Why the last VM could not be prepared, or ended while it waited.
    pub failed: Option<String>,
}

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub name: String,
    pub verdict: Verdict,
    pub found: String,
}

impl From<VitalsResponse> for GuestUsage {
    fn from(vitals: VitalsResponse) -> Self {
        Self {
            memory_used_bytes: vitals.memory_total_bytes.saturating_sub(vitals.memory_available_bytes),
            network_received_bytes: vitals.network_received_bytes,
            network_sent_bytes: vitals.network_sent_bytes,
            processes: vitals.processes,
        }
    }
}

impl From<wire::Usage> for Usage {
    fn from(usage: wire::Usage) -> Self {
        Self {
            id: usage.id,
            name: usage.name,
            guest: usage.guest.map(Into::into),
            host_cpu_nanoseconds: usage.host_cpu_nanoseconds,
            host_resident_bytes: usage.host_resident_bytes,
            host_private_bytes: usage.host_private_bytes,
            host_shared_bytes: usage.host_shared_bytes,
            host_proportional_bytes: usage.host_proportional_bytes,
            host_memory: Memory {
                resident: usage.host_resident_bytes,
                private_dirty: usage.host_private_dirty_bytes,
                template: usage.host_common.map(|common| {
                    let device = (common.device_major, common.device_minor);
                    (metering::Template { device, inode: common.inode }, common.bytes)
                }),
            },
            scratch_bytes: usage.scratch_bytes,
            memory_bytes: usage.memory_bytes,
            given_bytes: usage.given_bytes,
        }
    }
}

pub(crate) fn common_to_wire(memory: &Memory) -> Option<wire::CommonPages> {
    let (metering::Template { device, inode }, bytes) = memory.template?;
    Some(wire::CommonPages { device_major: device.0, device_minor: device.1, inode, bytes })
}

pub(crate) fn finding_to_wire(check: Check) -> wire::Check {
    let (verdict, repair) = match check.verdict {
        Verdict::Good => (wire::check::Verdict::Good, None),
        Verdict::Degraded { repair } => (wire::check::Verdict::Degraded, repair),
        Verdict::Bad { repair } => (wire::check::Verdict::Bad, Some(repair)),
    };
    wire::Check {
        name: check.name.to_owned(),
        verdict: verdict.into(),
        found: check.found,
        repair: repair.unwrap_or_default(),
    }
}

impl From<wire::Check> for Finding {
    fn from(check: wire::Check) -> Self {
        let verdict = match check.verdict() {
            wire::check::Verdict::Good => Verdict::Good,
            wire::check::Verdict::Degraded => {
                Verdict::Degraded { repair: Some(check.repair).filter(|repair| !repair.is_empty()) }
            }
            wire::check::Verdict::Bad => Verdict::Bad { repair: check.repair },
        };
        Self { name: check.name, verdict, found: check.found }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_vm_shares_crosses_the_wire_unchanged() {
        let template = metering::Template { device: (254, 1), inode: 7 };
        let memory = Memory { resident: 30, private_dirty: 10, template: Some((template, 20)) };
        let there = Usage::from(wire::Usage {
            host_resident_bytes: 30,
            host_private_dirty_bytes: 10,
            host_common: common_to_wire(&memory),
            ..wire::Usage::default()
        });
        assert_eq!(there.host_memory, memory);
    }

    #[test]
    fn a_finding_crosses_the_wire_unchanged() {
        for verdict in [
            Verdict::Good,
            Verdict::Degraded { repair: None },
            Verdict::Degraded { repair: Some("do it".into()) },
            Verdict::Bad { repair: "do it".into() },
        ] {
            let check = Check { name: "kvm", verdict: verdict.clone(), found: "this".into() };
            let there = Finding::from(finding_to_wire(check));
            assert_eq!(there, Finding { name: "kvm".into(), verdict, found: "this".into() });
        }
    }
}
