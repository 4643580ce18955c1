//! What a VM's task is told, and how others reach it.

use std::path::PathBuf;
use std::sync::Arc;

use imp_protocol::connection::Connection;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;

use super::asks::{Activation, Ask, Save, Saved};
use crate::boot::Kernel;
use crate::guest::Channel;
use crate::ledger;
use crate::lifecycle::Input;
use crate::network::Network;
use crate::ports::Published;
use crate::process::Process;
use crate::status::{AgentFacts, EnforcedLimit, NotEnforced, State, VmStatus};
use crate::vmm::snapshot::SnapshotFiles;
use crate::vmm::{BootConfig, Machine};

/// What a VM's task is told.
pub(crate) enum Message {
    Happened(Input),
    /// Disks, network and limits are there.
    Prepared(Box<Prepared>),
    /// The VMM's process runs and waits for this machine, under all limits but these.
    Launched(Process, Box<BootConfig>, Vec<NotEnforced>),
    Attached(Arc<dyn Machine>),
    Answered(Connection, AgentFacts, Channel),
    /// The guest goes on, as itself or as a new machine.
    Woken(Connection, AgentFacts, Channel),
    Activate(Box<Activation>),
    Save(Box<Save>),
    Saved(Saved),
    Pause(Ask),
    Resume(Ask),
    /// Somebody wants to use the machine's lane.
    Machine(oneshot::Sender<Arc<dyn Machine>>),
    /// Forget the VM, if nothing of it runs.
    Remove(oneshot::Sender<Result<(), NotRemoved>>),
}

#[derive(Debug, thiserror::Error)]
pub enum NotRemoved {
    #[error("it is {state:?}: stop it first")]
    Lives { state: State },
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
}

/// What preparing a VM has brought.
pub(crate) struct Prepared {
    pub kernel: Kernel,
    pub initramfs: PathBuf,
    /// What the machine is made of, if it does not boot.
    pub snapshot: Option<SnapshotFiles>,
    pub ports: Vec<Published>,
    pub network: Option<Network>,
    pub limits: Vec<EnforcedLimit>,
    pub not_enforced: Vec<NotEnforced>,
}

/// How others reach a VM.
#[derive(Clone)]
pub(crate) struct Handle {
    pub messages: mpsc::UnboundedSender<Message>,
    pub status: watch::Receiver<Arc<VmStatus>>,
    pub connection: watch::Receiver<Option<Connection>>,
    /// Changes with the log, and ends with it.
    pub log: watch::Receiver<u64>,
    /// Who holds the connection.
    pub holders: TaskTracker,
    /// One permit: the lane has one user at a time.
    pub lane: Arc<Semaphore>,
    /// One permit: who has it may put the VM to sleep.
    pub rest: Arc<Semaphore>,
    /// Memory that is promised while the VM lives.
    pub memory: u64,
}
