//! What this crate asks of a virtual machine monitor: the part that QEMU and Firecracker have in common.
//!
//! ```text
//! Driver::spawn ─► a process that waits ─► Driver::attach ─► Machine: the guest boots
//!                  (recorded, limited)     (also for a machine that an earlier owner started)
//! ```
//!
//! What only a machine that is attached to can do (pausing, say) is a method of [`Machine`]; what only one driver can do
//! is asked of [`Driver`] first.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::net::UnixStream;

use crate::layout::VmLayout;
use crate::process::Process;
use crate::spec::{Cpus, Memory};
use crate::status::{DriverFacts, VmmEnd};

pub(crate) mod qemu;

/// Starts machines and takes them over.
pub(crate) trait Driver: Send + Sync {
    fn facts(&self) -> &DriverFacts;

    /// The program that is started; with the argument that `mark` gives, it is recognised among all processes.
    fn program(&self) -> &Path;

    /// An argument that only the process of this VM has.
    fn mark(&self, boot: &str) -> String;

    /// How long a guest may take from the spawn to its agent's first answer.
    fn answer_deadline(&self) -> Duration;

    /// Memory of the monitor itself, beside that of its guest.
    fn overhead_bytes(&self) -> u64;

    /// Starts the process, which outlives this one. It waits, without its guest's memory, until it is attached to.
    fn spawn(&self, boot: &BootConfig, vm: &VmLayout) -> Result<Process, Error>;

    /// Takes the machine in hand: its control connection and its console.
    fn attach<'a>(
        &'a self,
        vm: &'a VmLayout,
        process: Process,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, Error>>;
}

/// A machine that is attached to. Dropping it leaves the machine running.
pub(crate) trait Machine: Send + Sync {
    /// A new byte stream to the guest's agent; there is one at a time.
    fn connect_channel(&self) -> BoxFuture<'_, Result<UnixStream, Error>>;

    /// Waits for the end of the process, whatever ends it, and until its console is written down.
    fn ended(&self) -> BoxFuture<'_, VmmEnd>;
}

/// Everything a machine boots from.
#[derive(Debug)]
pub(crate) struct BootConfig {
    pub id: String,
    pub cpus: Cpus,
    pub memory: Memory,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Without what the driver adds: console and clock.
    pub command_line: String,
    /// In the order in which the guest sees them: the first is /dev/vda.
    pub drives: Vec<Drive>,
    pub drive_limit: DriveLimit,
    pub network: Option<NetworkDevice>,
    /// Name of the channel in the guest.
    pub channel: String,
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
    /// Connected to what carries the frames.
    pub socket: OwnedFd,
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
    #[error("cannot start {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot hold the new machine's process")]
    Hold(#[source] crate::process::Error),
    #[error("the machine's monitor failed")]
    Monitor(#[source] qemu::qmp::Error),
}
