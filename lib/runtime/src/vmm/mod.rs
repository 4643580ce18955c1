//! What this crate asks of a virtual machine monitor: the part that QEMU and Firecracker have in common.
//!
//! ```text
//! Driver::spawn ─► a process that waits ─► Driver::begin ─► Machine: the guest boots, or its snapshot is loaded
//!                  (recorded, limited)
//!                  a process that another owner started ─► Driver::adopt ─► Machine
//! ```
//!
//! What only a machine that is attached to can do (pausing, say) is a method of [`Machine`]; what only one driver can do
//! is asked of [`Driver`] first.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use imp_network::spec::TapOwner;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::layout::VmLayout;
use crate::process::{self, Process};
use crate::spec::{Balloon, Cpus, Memory, NetworkMode};
use crate::status::{BalloonFacts, DriverFacts, VmmEnd};

pub(crate) mod drivers;
#[cfg(test)]
mod fake;
pub(crate) mod firecracker;
pub(crate) mod kvm;
pub(crate) mod memory;
pub(crate) mod qemu;
pub(crate) mod snapshot;
#[cfg(test)]
mod snapshot_tests;

use snapshot::{SnapshotFiles, SnapshotKind};

/// What a driver can do besides running machines that boot. Who needs any of it asks here first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Snapshots that it makes, and makes machines of.
    pub snapshots: &'static [SnapshotKind],
    /// Limits of what goes over a network.
    pub network_limits: Possible,
    /// Balloons, by which guests give memory back.
    pub balloons: Possible,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Possible {
    Yes,
    No,
}

/// Starts machines and takes them over.
pub(crate) trait Driver: Send + Sync {
    fn facts(&self) -> &DriverFacts;

    fn capabilities(&self) -> Capabilities;

    /// Networks that a machine can be attached to, the best first; none is always possible.
    fn networks(&self) -> &'static [NetworkMode];

    /// Users that machines run as, one for each, with a group of the same number. Absent: they run as this process does.
    fn users(&self) -> Option<Range<u32>> {
        None
    }

    /// The program that is started; with the argument that `mark` gives, it is recognised among all processes.
    fn program(&self) -> &Path;

    /// An argument that only the process of this VM has.
    fn mark(&self, boot: &str) -> String;

    /// Processes of this VM that nobody has written down: its owner died while it started them by `program`.
    fn strays(&self, program: &Path, id: &str) -> Vec<Process> {
        process::find(program.as_os_str(), self.mark(id).as_ref())
    }

    /// How long a guest may take from the spawn to its agent's first answer.
    fn answer_deadline(&self) -> Duration;

    /// Memory of the monitor itself, beside that of its guest.
    fn overhead_bytes(&self) -> u64;

    /// Starts the process, which outlives this one. It waits, without its guest's memory.
    fn spawn(&self, boot: &BootConfig, vm: &VmLayout) -> Result<Process, Error>;

    /// Takes the new process in hand and lets its guest boot. A machine that is made of a snapshot is loaded and paused; a
    /// snapshot that cannot be loaded is [`Error::NotLoaded`], and the end of the process.
    fn begin<'a>(
        &'a self,
        boot: &'a BootConfig,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>>;

    /// Takes in hand what an earlier owner started: its control connection and its console.
    fn adopt<'a>(
        &'a self,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>>;
}

/// A machine that is attached to. Dropping it leaves the machine running.
pub(crate) trait Machine: Send + Sync {
    /// A new byte stream to the guest's agent; there is one at a time. Waits for a guest that boots; one that has been
    /// reached before gets `patience` to take the connection.
    fn connect_channel(&self, patience: Duration) -> BoxFuture<'_, Result<UnixStream, Error>>;

    /// A new stream to the guest's lane, if the machine has one; there is one at a time. Whoever listens in the guest need not
    /// have noticed that the one before has ended.
    fn connect_lane(&self) -> BoxFuture<'_, Result<Option<UnixStream>, Error>> {
        Box::pin(async { Ok(None) })
    }

    /// The guest that boots has answered: from here on its reset is its end. Until then a machine may let it boot again.
    fn answered(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }

    /// Stops the guest between two instructions.
    fn pause(&self) -> BoxFuture<'_, Result<(), Error>>;

    /// Lets a paused guest go on.
    fn resume(&self) -> BoxFuture<'_, Result<(), Error>>;

    /// What the guest has given back; none: the machine has no balloon.
    fn balloon(&self) -> BoxFuture<'_, Result<Option<BalloonFacts>, Error>> {
        Box::pin(async { Ok(None) })
    }

    /// Wants this much of the guest's memory back, in whole MiB. The guest gives it, or takes it again, as soon as it can.
    fn inflate(&self, _bytes: u64) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { Err(Error::NoBalloon) })
    }

    /// Writes a snapshot of a machine that is paused and stays so. The files are made, in a directory that is there. Streams
    /// to the guest's agent may end by it, and have to be opened again when the guest goes on. A file of changes is lent: the
    /// next snapshot of changes adds to it.
    fn snapshot<'a>(&'a self, kind: SnapshotKind, to: &'a SnapshotFiles) -> BoxFuture<'a, Result<(), Error>>;

    /// Waits for the end of the process, whatever ends it, and until its console is written down.
    fn ended(&self) -> BoxFuture<'_, VmmEnd>;
}

/// Everything a machine boots from.
#[derive(Debug)]
pub(crate) struct BootConfig {
    pub id: String,
    /// Of those that the driver has, nobody else's.
    pub user: Option<u32>,
    pub origin: Origin,
    pub changes: Changes,
    pub cpus: Cpus,
    pub memory: Memory,
    /// Without what the driver adds: console, clock, channel.
    pub command_line: String,
    /// In the order in which the guest sees them: the first is /dev/vda.
    pub drives: Vec<Drive>,
    pub drive_limit: DriveLimit,
    pub network: Option<NetworkDevice>,
    /// A machine that is made of a snapshot has what that one had.
    pub balloon: Balloon,
}

/// What a guest boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
}

/// What a machine begins as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Boot(Image),
    /// Of a machine with the same devices; drives and network are this machine's own.
    Snapshot(SnapshotFiles),
}

/// Whether the monitor notes which pages of memory change, which costs time and makes snapshots of changes possible.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Changes {
    Noted,
    #[default]
    NotNoted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Drive {
    /// Stable name of the device: "base", "scratch".
    pub id: &'static str,
    pub path: PathBuf,
    pub access: Access,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Shared with other machines.
    ReadOnly,
    /// This machine's alone; what it holds need not survive a power cut of the host.
    Private,
}

/// Of all drives of a machine together; absent: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DriveLimit {
    pub bytes_per_second: Option<u64>,
    pub requests_per_second: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct NetworkDevice {
    pub mac: String,
    pub attachment: Attachment,
    pub limit: NetworkLimit,
}

/// Each way; absent: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NetworkLimit {
    pub bytes_per_second: Option<u64>,
    pub packets_per_second: Option<u64>,
}

/// What carries the frames of a network device.
#[derive(Debug)]
pub(crate) enum Attachment {
    /// A socket that is connected to a process, passt: each frame behind its length.
    Stream(OwnedFd),
    /// A tap device that is there, of this name in this network namespace, which is also where the VMM belongs.
    Tap { name: String, namespace: OwnedFd },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot listen on {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot hold the channel to the guest")]
    Channel(#[source] io::Error),
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "Firecracker has no network that works without privileges: use --network bridge (as root) or none, or have QEMU \
         run the machine (--driver qemu)"
    )]
    StreamNetwork,
    #[error(
        "QEMU does not limit what goes over a network: leave --network-bps and --network-pps out, or use Firecracker"
    )]
    NoNetworkLimit,
    #[error("cannot start {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot enter the network namespace of the VM")]
    EnterNamespace(#[source] io::Error),
    #[error("cannot open the tap device {name}")]
    Tap {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot hold the new machine's process")]
    Hold(#[source] crate::process::Error),
    #[error("the machine's monitor failed")]
    Monitor(#[source] qemu::qmp::Error),
    #[error("Firecracker did not do what it was asked for")]
    Api(#[source] firecracker::api::Error),
    #[error("QEMU does not say how much memory its guest has")]
    NoMemorySize,
    #[error("QEMU did not write a snapshot")]
    Save(#[source] qemu::snapshot::Error),
    #[error("the snapshot cannot be loaded")]
    NotLoaded(#[source] NotLoaded),
    #[error("{driver} makes no snapshots of this kind")]
    NoSnapshot { driver: &'static str },
    #[error("Firecracker cannot be started in a jail")]
    Jail(#[source] firecracker::jail::Error),
    #[error("this machine has no balloon, by which its guest would give memory back")]
    NoBalloon,
    #[error("Firecracker was never told to let its guest run, and nobody is left who would")]
    NeverBegun,
    #[error("the guest cannot be reached over vsock")]
    Vsock(#[source] firecracker::channel::Error),
}

/// Why no machine is made of a snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotLoaded {
    /// In the words of the VMM.
    #[error("{said}")]
    Refused { said: String },
    #[error(transparent)]
    Files(#[from] qemu::snapshot::Fault),
    #[error(transparent)]
    Machine(Box<Error>),
    #[error("reading it was ended")]
    Ended,
}

impl Error {
    /// Whether somebody is there who did not answer in time: more of it may help.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Vsock(firecracker::channel::Error::Silent { .. }))
    }
}

/// Whom a tap has to belong to for a machine that runs as `user`.
pub(crate) fn tap_owner(user: Option<u32>) -> TapOwner {
    match user {
        Some(user) => TapOwner { user, group: user },
        None => {
            TapOwner { user: rustix::process::geteuid().as_raw(), group: rustix::process::getegid().as_raw() }
        }
    }
}

/// The program of this name in PATH.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|d| d.join(name)).find(|p| p.is_absolute() && p.is_file())
}

/// Where a machine with a tap lives: whoever breaks out of its guest is still behind the filters of its network.
fn namespace(boot: &BootConfig) -> Option<BorrowedFd<'_>> {
    match &boot.network.as_ref()?.attachment {
        Attachment::Stream(_) => None,
        Attachment::Tap { namespace, .. } => Some(namespace.as_fd()),
    }
}

/// Does `work` in the namespace, or where this process is.
fn inside<T: Send>(namespace: Option<BorrowedFd<'_>>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    match namespace {
        Some(namespace) => imp_sys::netns::inside(namespace, work).map_err(Error::EnterNamespace),
        None => Ok(work()),
    }
}
