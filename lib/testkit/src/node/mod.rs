//! Node VMs: machines in which the official Firecracker and its jailer run whole, on hosts without KVM.
//!
//! QEMU emulates a processor with virtualisation of its own. The node sees listed directories of the host, read-only and
//! with a layer of memory over them, under the same paths: what was built on the host runs there.
//!
//! ```text
//! test ──channel──► unshare ─► imp-node (guard, PID 1 of a process and mount namespace)
//!                                ├─► virtiofsd ◄─ listed directories
//!                                └─► QEMU ─► kernel ─► imp-node (PID 1 of the node) ─► programs, Firecracker, guests
//! ```
//!
//! The test alone holds its end of the channel: when it drops the node, or dies, the guard ends everything. A test that
//! wants to be in the node itself calls [`inside`].

pub mod artefacts;
mod builder;
mod channel;
mod error;
mod inside;
mod kvm;
mod launch;
pub mod lent;
mod logs;
mod network;
mod plan;
mod program;
mod transfer;

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use imp_testkit_node::wire::Message;

pub use builder::Builder;
pub use error::{Error, Logs, NetworkStep};
pub use imp_testkit_node::wire::End;
pub(crate) use inside::is_node;
pub use inside::{Place, again_inside, inside, inside_within, place};
pub use network::Network;
pub use program::{Command, Output, Piece, Process};

use channel::{Channel, Conversation};
use plan::Attachment;

/// Where a node keeps what is large: its other directories are in its memory.
pub(crate) const NODE_DISK: &str = "/data";

/// The guard ends when its channel hangs up; it kills two processes and removes a folder before.
const END_DEADLINE: Duration = Duration::from_secs(20);

/// A running node. Dropping it ends it.
#[derive(Debug)]
pub struct NodeVm {
    shared: Arc<Shared>,
    guard: Child,
    address: Option<Ipv4Addr>,
}

/// What the node's programs need of it.
#[derive(Debug)]
struct Shared {
    channel: Channel,
    name: String,
    folder: PathBuf,
    /// Where its logs are saved; none has been so far.
    logs: OnceLock<PathBuf>,
}

impl Shared {
    fn send(&self, conversation: u32, message: Message) -> Result<(), Error> {
        self.channel
            .send(conversation, message)
            .map_err(|source| Error::Silent { logs: self.save_logs(), source })
    }

    /// Each time to the same folder.
    fn save_logs(&self) -> Logs {
        logs::save(&self.folder, self.logs.get_or_init(|| logs::place(&self.name)))
    }
}

impl NodeVm {
    #[must_use]
    pub fn builder() -> Builder<'static> {
        Builder::new()
    }

    /// A node with the defaults.
    pub fn start() -> Result<Self, Error> {
        Self::builder().start()
    }

    /// And the conversation in which the node says that it is ready.
    fn new(
        stream: UnixStream,
        guard: Child,
        name: String,
        folder: PathBuf,
        attachment: Option<Attachment>,
    ) -> Result<(Self, Conversation), Error> {
        let (channel, node) =
            Channel::new(stream).map_err(|source| Error::Write { path: folder.clone(), source })?;
        let shared = Arc::new(Shared { channel, name, folder, logs: OnceLock::new() });
        Ok((Self { shared, guard, address: attachment.map(|attachment| attachment.address) }, node))
    }

    /// Runs a program to its end.
    pub fn exec(&self, command: Command) -> Result<Output, Error> {
        self.spawn(command)?.wait()
    }

    /// Runs a program to its end and wants exit code 0.
    pub fn check(&self, command: Command) -> Result<Output, Error> {
        let text = command.to_string();
        let output = self.exec(command)?;
        match output.code() {
            Some(0) => Ok(output),
            _ => Err(Error::Failed { command: text, output: Box::new(output) }),
        }
    }

    /// Starts a program and lets it run.
    pub fn spawn(&self, command: Command) -> Result<Process, Error> {
        Process::start(Arc::clone(&self.shared), command)
    }

    /// Its address in the network that it was started in.
    #[must_use]
    pub fn address(&self) -> Option<Ipv4Addr> {
        self.address
    }

    /// Copies console and logs to a folder that outlives the node, and names it.
    #[must_use]
    pub fn save_logs(&self) -> Logs {
        self.shared.save_logs()
    }
}

impl Drop for NodeVm {
    fn drop(&mut self) {
        if thread::panicking() && self.shared.logs.get().is_none() {
            eprintln!("the node of the failed test: {}", self.shared.save_logs());
        }
        self.shared.channel.hang_up();
        let until = Instant::now() + END_DEADLINE;
        while matches!(self.guard.try_wait(), Ok(None)) {
            if Instant::now() > until {
                // Ends the guard, and the kernel with it all that it started.
                let _ = self.guard.kill();
                let _ = self.guard.wait();
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        // The guard has removed it, unless it was killed. Its mounts were never seen here.
        let _ = std::fs::remove_dir_all(&self.shared.folder);
    }
}
