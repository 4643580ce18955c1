//! What is known of a VM, as it is shown and kept.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use imp_storage::blob::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::id::VmId;
use crate::metering;
use crate::spec::{CopiedMount, Cpus, DiskSize, Egress, Memory, NetworkMode, VmName};

mod fault;
mod outcome;

pub use fault::Fault;
pub use outcome::{Failure, Outcome, VmmEnd};

/// Everything `inspect` shows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmStatus {
    pub id: VmId,
    pub name: VmName,
    pub image: String,
    pub base_key: String,
    /// Program and arguments, for people: bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    pub state: State,
    /// Present once the VM has ended.
    pub outcome: Option<Outcome>,
    pub created: SystemTime,
    /// When the main process started.
    pub started: Option<SystemTime>,
    pub ended: Option<SystemTime>,
    /// Process of the VMM while it lives.
    pub vmm_pid: Option<u32>,
    /// User and group of its own that the VMM runs as, in a jail; absent: it runs as its owner does.
    #[serde(default)]
    pub vmm_user: Option<u32>,
    pub driver: DriverFacts,
    pub kernel: KernelFacts,
    /// What the agent in the guest said of itself.
    pub agent: Option<AgentFacts>,
    pub cpus: Cpus,
    pub memory: Memory,
    pub scratch: DiskSize,
    pub network: NetworkFacts,
    pub ports: Vec<PortFacts>,
    pub mounts: Vec<CopiedMount>,
    pub labels: BTreeMap<String, String>,
    /// What the main process gets between its stop signal and SIGKILL when nobody says otherwise.
    pub stop_grace: std::time::Duration,
    /// The snapshot that it was made of; absent: it booted.
    #[serde(default)]
    pub made_of: Option<Digest>,
    #[serde(default)]
    pub secrets: Secrets,
    /// Limits of the whole VM, its VMM included, that the host enforces.
    #[serde(default)]
    pub limits: Vec<EnforcedLimit>,
    /// Limits that this host could not enforce, and why.
    pub not_enforced: Vec<NotEnforced>,
    /// What was asked for.
    #[serde(default)]
    pub asked: crate::spec::Limits,
    /// Present in a VM with a balloon: as it was when the machine began, or when somebody last asked for memory.
    #[serde(default)]
    pub balloon: Option<BalloonFacts>,
    /// Present once output of the main process could not be recorded.
    #[serde(default)]
    pub lost_output: Option<LostOutput>,
    /// Present while the VMM lives and its guest does not answer.
    #[serde(default)]
    pub unreachable_since: Option<SystemTime>,
    /// Milliseconds from the start of the VM to the end of each stage it reached, in order.
    pub stages: Vec<Stage>,
    /// How it went on last, if it did so under this owner.
    #[serde(skip)]
    pub wake: Option<WakeTimes>,
}

/// What it took to have a machine go on that stood still, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WakeTimes {
    /// The VMM had the machine go on.
    pub resume: Duration,
    /// Its guest answered a greeting.
    pub reach: Duration,
    /// Its guest made the repairs, and confirmed them.
    pub confirm: Duration,
    /// Each repair that was confirmed, and what it took in the guest.
    pub repairs: Vec<(&'static str, Duration)>,
}

/// Where a VM is in its life, for people and scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    Created,
    /// From the spawn of the VMM to the start of the main process.
    Starting,
    /// Made of a snapshot, loaded and paused: nobody's yet.
    Prepared,
    Running,
    /// Its processes stand still for a moment: a snapshot is made of it, or it is about to be paused, or to go on.
    Asleep,
    /// Until its user wants it to go on.
    Paused,
    /// The main process has ended or a stop was asked for; the machine is going down.
    Stopping,
    /// Nothing of it runs any more.
    Stopped,
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Prepared => "prepared",
            Self::Running => "running",
            Self::Asleep => "asleep",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        })
    }
}

impl State {
    /// Whether there is something of it that an owner looks after.
    pub fn lives(self) -> bool {
        match self {
            Self::Starting
            | Self::Prepared
            | Self::Running
            | Self::Asleep
            | Self::Paused
            | Self::Stopping => true,
            Self::Created | Self::Stopped => false,
        }
    }
}

/// Whether its guest was given secrets, or comes from one that was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Secrets {
    #[default]
    None,
    Held,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverFacts {
    /// "qemu".
    pub name: String,
    pub version: String,
    pub accelerator: Accelerator,
    /// Why this accelerator.
    pub why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    Kvm,
    Emulation,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFacts {
    pub path: PathBuf,
    /// Digest of the bundle; absent for a kernel that was given as a file.
    pub digest: Option<String>,
    pub release: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentFacts {
    pub version: String,
    pub kernel_release: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkFacts {
    pub mode: NetworkMode,
    pub mac: Option<String>,
    /// With prefix length.
    pub addresses: Vec<String>,
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    pub nameservers: Vec<IpAddr>,
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Of a bridge network: the addresses by which the host knows the VM.
    #[serde(default)]
    pub uplink: Vec<IpAddr>,
    /// Of a bridge network: what the VM may reach.
    #[serde(default)]
    pub egress: Option<Egress>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortFacts {
    pub host: SocketAddr,
    pub guest: u16,
}

/// A setting of a control group, as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnforcedLimit {
    /// File of the setting.
    pub path: PathBuf,
    pub value: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotEnforced {
    pub limit: String,
    pub why: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub name: StageName,
    pub milliseconds: u64,
}

/// Output of a main process that is not in the log: when it came it could not be written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostOutput {
    /// About: after a break the guest may send some of it again.
    pub bytes: u64,
    /// Of the last loss.
    pub why: String,
}

/// Memory that a guest has given back. It is the guest's word: whoever breaks into its kernel may take it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonFacts {
    /// Asked for.
    pub wanted_bytes: u64,
    pub given_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StageName {
    /// Disks and initramfs are there.
    Prepared,
    Spawned,
    /// The guest agent answered.
    Answered,
    Configured,
    MountsCopied,
    Initialised,
    MainStarted,
    /// The snapshot is loaded; the machine stands still.
    Loaded,
    /// Resumed, and its guest confirmed all that had to be repaired.
    Woken,
}

/// What `top` shows of a VM, from the host's side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time of the VMM since its start.
    pub cpu_nanoseconds: u64,
    pub resident_bytes: u64,
    /// As it is counted where VMs share a snapshot's pages.
    pub memory: metering::Memory,
    /// Pages that only this VMM has, and that are not a snapshot's.
    pub private_bytes: u64,
    /// Pages of its program that other processes have, too, and those of the snapshot that the VM is made of.
    pub shared_bytes: u64,
    /// Its proportional share of all its pages.
    pub proportional_bytes: u64,
    /// Allocated blocks of the scratch disk.
    pub scratch_bytes: u64,
    /// Blocks of logs and console.
    pub log_bytes: u64,
}

/// A change of one VM, for whoever watches all.
#[derive(Debug, Clone)]
pub enum Event {
    Changed(std::sync::Arc<VmStatus>),
    Removed(VmId),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_told_in_the_word_in_which_it_is_listed() {
        for state in [
            State::Created,
            State::Starting,
            State::Prepared,
            State::Running,
            State::Asleep,
            State::Paused,
            State::Stopping,
            State::Stopped,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
        }
    }
}
