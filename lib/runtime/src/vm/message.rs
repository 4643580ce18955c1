//! What a VM's task is told, and how others reach it.

use std::sync::Arc;

use imp_protocol::connection::Connection;
use tokio::sync::{Mutex, Semaphore, mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;

use super::asks::{Activation, Ask, Save, Saved};
use crate::guest::Channel;
use crate::ledger::{self, Booted};
use crate::lifecycle::Input;
use crate::network::Network;
use crate::ports::Published;
use crate::process::Process;
use crate::spec::Balloon;
use crate::status::{
    AgentFacts, BalloonFacts, EnforcedLimit, KernelFacts, LostOutput, NotEnforced, State, VmStatus, WakeTimes,
};
use crate::vmm::{self, BootConfig, Machine};

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
    Woken(Connection, AgentFacts, Channel, WakeTimes),
    Activate(Box<Activation>),
    Save(Box<Save>),
    Saved(Saved),
    Pause(Ask),
    Resume(Ask),
    /// What its guest has given back.
    Balloon(BalloonFacts),
    /// Output of its main process cannot be recorded.
    Lost(LostOutput),
    /// Somebody wants to use the machine's lane, or its balloon.
    Machine(oneshot::Sender<Arc<dyn Machine>>),
    /// Nobody has come back for what it had to say, or is expected any more.
    Leave,
    /// Forget the VM, if nothing of it runs.
    Remove(oneshot::Sender<Result<(), NotRemoved>>),
}

#[derive(Debug, thiserror::Error)]
pub enum NotRemoved {
    #[error("it is {state}: stop it first with `imp stop`, or remove it with `imp rm -f`")]
    Lives { state: State },
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
}

/// What preparing a VM has brought.
pub(crate) struct Prepared {
    /// What the machine begins as.
    pub origin: vmm::Origin,
    pub kernel: KernelFacts,
    pub booted: Option<Booted>,
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
    /// Held while what has changed in its memory is read: a later snapshot adds to that.
    pub changes: Arc<Mutex<()>>,
    /// Memory that is promised while the VM lives.
    pub memory: u64,
    pub balloon: Balloon,
}
