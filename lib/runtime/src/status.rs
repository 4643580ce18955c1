//! What is known of a VM, as it is shown and kept.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::SystemTime;

use imp_storage::blob::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::id::VmId;
use crate::metering;
use crate::spec::{CopiedMount, Cpus, DiskSize, Egress, Memory, NetworkMode, VmName};

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
    /// Present while the VMM lives and its guest does not answer.
    #[serde(default)]
    pub unreachable_since: Option<SystemTime>,
    /// Milliseconds from the start of the VM to the end of each stage it reached, in order.
    pub stages: Vec<Stage>,
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

/// Whether its guest was given secrets, or comes from one that was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Secrets {
    #[default]
    None,
    Held,
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum Outcome {
    /// The main process exited.
    Exited { code: u8 },
    /// The main process was ended by a signal.
    Signalled { signal: u8, out_of_memory: bool, timed_out: bool },
    /// The main process could not be started; `code` is what a shell would say: 126 or 127.
    NotStarted { why: String, code: u8 },
    /// The VM was killed by its user before its main process had ended.
    Killed,
    /// The guest powered off by itself.
    PoweredOff,
    /// The VM did not come up, or broke: what went wrong, and the last lines of its console.
    Failed { failure: Failure, console: Vec<String> },
}

impl Outcome {
    /// Exit code for a shell: the program's own, 128 + signal, 125 for a VM that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited { code } | Self::NotStarted { code, .. } => *code,
            Self::Signalled { signal, .. } => signal.saturating_add(128),
            Self::Killed => 137,
            Self::PoweredOff => 0,
            Self::Failed { .. } => 125,
        }
    }
}

/// Why a VM failed; `detail` holds the causes, outermost first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Failure {
    #[error("whoever created it did not start it within {seconds} s")]
    NeverStarted { seconds: u64 },
    #[error("the machine could not be started: {detail}")]
    Spawn { detail: String },
    #[error("the machine ended while it booted ({vmm}); see the last lines of its console")]
    EndedInBoot { vmm: VmmEnd },
    #[error("the machine ended before anybody had it ({vmm}); see the last lines of its console")]
    EndedDormant { vmm: VmmEnd },
    #[error("{command:?} of its template failed ({outcome}): {output}")]
    Init { command: String, outcome: String, output: String },
    #[error("the guest did not answer within {seconds} s; see `imp logs --console`")]
    NoAnswer { seconds: u64 },
    #[error("the guest's processes could not be made to stand still")]
    NoSleep,
    #[error("the guest could not be set up: {detail}")]
    Setup { detail: String },
    #[error("the machine ended under the main process ({vmm}); see the last lines of its console")]
    EndedWhileRunning { vmm: VmmEnd },
    #[error("the channel to the guest broke and did not come back within {seconds} s")]
    ChannelLost { seconds: u64 },
    #[error(
        "the guest's agent died, and the main process with it; see `imp logs --console`, and run it again"
    )]
    MainLost,
    #[error("the process that owned the machine ended before the main process had started; run it again")]
    OwnerGone,
    #[error("the machine was gone when its owner came back; how its main process ended is not known")]
    GoneUnseen,
}

/// How a VMM process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "end", content = "value")]
pub enum VmmEnd {
    /// The guest powered off.
    PoweredOff,
    /// The guest restarted, which is what a kernel panic looks like.
    Reset,
    Exit(i32),
    Signal(i32),
    /// The kernel killed it, because the VM needed more memory than its control group lets it have.
    OutOfMemory {
        limit_bytes: u64,
    },
    /// It was not a child of this process, so only its end is known.
    Unknown,
}

impl std::fmt::Display for VmmEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest's kernel panicked or restarted"),
            Self::Exit(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::OutOfMemory { limit_bytes } => {
                write!(f, "the kernel killed it at its memory limit of {} MiB", limit_bytes >> 20)
            }
            Self::Unknown => f.write_str("how is not known"),
        }
    }
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
