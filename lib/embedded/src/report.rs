//! What an owner reports of its VMs and its machine, as plain types.

use imp_protocol::guest::VitalsResponse;
use imp_protocol::runtime as wire;
use imp_runtime::{Check, Verdict};

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
    /// Pages that only this VMM has.
    pub host_private_bytes: u64,
    /// Pages that other processes have, too.
    pub host_shared_bytes: u64,
    /// Its share of all its pages: a page that three have counts a third.
    pub host_proportional_bytes: u64,
    /// Allocated blocks of the scratch disk.
    pub scratch_bytes: u64,
    /// What the VM was given.
    pub memory_bytes: u64,
}

/// What a guest says of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestUsage {
    pub memory_used_bytes: u64,
    pub network_received_bytes: u64,
    pub network_sent_bytes: u64,
    pub processes: u32,
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
            scratch_bytes: usage.scratch_bytes,
            memory_bytes: usage.memory_bytes,
        }
    }
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
