//! One task owns one VM: it feeds what happens to [`Phase::on`], carries out the commands, keeps the record and tells
//! whoever watches.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use imp_protocol::connection::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::admission;
use crate::boot::InitramfsCache;
use crate::guest::Channel;
use crate::id::VmId;
use crate::layout::{Layout, VmLayout};
use crate::ledger::{self, Origin, Record};
use crate::lifecycle::{Command, Deadline, Input, Phase, Remains, Times, VmmRemains};
use crate::network::Network;
use crate::network::bridge::Bridges;
use crate::pins::Keeper;
use crate::ports::Published;
use crate::process::Process;
use crate::spec::Memory;
use crate::status::{Event, Outcome, VmStatus};
use crate::template::InitCommand;
use crate::vmm::drivers::Drivers;
use crate::vmm::{Driver, Machine};
use asks::Asks;
use ended::Evidence;

mod asks;
mod asleep;
mod clean_up;
mod ended;
mod follow;
mod leave;
mod message;
mod prepare;
mod record;
mod steps;
mod working_set;

pub(crate) use asks::{Activation, Becomes, Given, Save, Saved};
pub use asks::{NotActivated, RestError};
pub(crate) use imp_protocol::causes::chain;
pub(crate) use message::{Handle, Message, NotRemoved, Prepared};

/// What all VMs of one owner share.
pub(crate) struct Context {
    pub layout: Layout,
    pub drivers: Drivers,
    pub agent: std::path::PathBuf,
    pub initramfs: InitramfsCache,
    pub store: imp_storage::store::Store,
    pub events: broadcast::Sender<Event>,
    /// Ends all tasks, not the VMs, when the owner lets go.
    pub ended: CancellationToken,
    pub bridges: Bridges,
    /// Machines that come to life at the same time. More would be no faster, and each would wait longer for its guest.
    pub coming_to_life: Arc<Semaphore>,
    pub keeper: Keeper,
    /// Keeps the data directory until the last task is gone. Last, so that who takes it finds all else let go.
    pub _lock: std::fs::File,
}

/// How the life of a VM begins for this owner.
pub(crate) enum Beginning {
    /// With the commands that a template begins with.
    Created(Vec<InitCommand>),
    /// Created for an owner that is gone, and with it the environment of its main process.
    Abandoned,
    Adopted {
        phase: Phase,
        commands: Vec<Command>,
        vmm: Option<Process>,
        network: Option<Process>,
    },
    /// It had ended before.
    Stopped(Outcome),
}

impl Beginning {
    /// Whether its VMM lives, as far as that is on record.
    pub(crate) fn lives(&self) -> bool {
        matches!(self, Self::Adopted { vmm: Some(_), .. })
    }
}

/// Starts the task of a VM whose record is in the ledger.
pub(crate) fn run(context: Arc<Context>, mut record: Record, beginning: Beginning) -> Handle {
    let driver = context.drivers.of(&record.status.driver);
    let memory = need(&record.origin, record.spec.memory, driver.as_ref());
    let mut initial = Vec::new();
    let taken_over = match &beginning {
        Beginning::Created(_) | Beginning::Abandoned => None,
        Beginning::Adopted { .. } | Beginning::Stopped(_) => Some(Instant::now()),
    };
    let (phase, commands, vmm, network) = match beginning {
        Beginning::Created(commands) => {
            initial = commands;
            let (phase, commands) = Phase::created();
            (phase, commands, None, None)
        }
        Beginning::Abandoned => {
            let (phase, commands) = Phase::adopted(Remains::Unfinished { vmm: VmmRemains::Gone });
            (phase, commands, None, None)
        }
        Beginning::Stopped(outcome) => (Phase::Stopped { outcome }, Vec::new(), None, None),
        Beginning::Adopted { phase, commands, vmm, network } => (phase, commands, vmm, network),
    };
    // What the record says is as old as its last write.
    record.status.state = phase.state();
    record.status.unreachable_since = matches!(phase, Phase::Reconnecting).then(SystemTime::now);
    let (messages, inbox) = mpsc::unbounded_channel();
    let (status, status_receiver) = watch::channel(Arc::new(record.status.clone()));
    let (connection, connection_receiver) = watch::channel(None);
    let (log, log_receiver) = watch::channel(0);
    let holders = TaskTracker::new();
    let lane = Arc::new(Semaphore::new(1));
    let handle = Handle {
        messages: messages.clone(),
        status: status_receiver,
        connection: connection_receiver,
        log: log_receiver,
        holders: holders.clone(),
        lane: Arc::clone(&lane),
        rest: Arc::new(Semaphore::new(1)),
        changes: Arc::default(),
        memory,
        balloon: record.spec.balloon,
    };
    let log = (!matches!(phase, Phase::Stopped { .. })).then(|| Arc::new(log));
    let vm = Vm {
        layout: context.layout.vm(&record.status.id),
        id: record.status.id.clone(),
        driver,
        context,
        record,
        phase,
        began: Instant::now(),
        messages,
        status,
        connection,
        log,
        holders,
        lane,
        initial: initial.into(),
        prepared: None,
        asks: Asks::default(),
        resting: None,
        ports: Vec::new(),
        vmm,
        network,
        name_server: None,
        machine: None,
        channel: None,
        step: None,
        taken_over,
        leaving: None,
        loss_watch: None,
        exit_watch: None,
        deadlines: Vec::new(),
    };
    tokio::spawn(vm.live(inbox, commands));
    handle
}

struct Vm {
    context: Arc<Context>,
    driver: Arc<dyn Driver>,
    id: VmId,
    layout: VmLayout,
    record: Record,
    phase: Phase,
    began: Instant,
    messages: mpsc::UnboundedSender<Message>,
    status: watch::Sender<Arc<VmStatus>>,
    connection: watch::Sender<Option<Connection>>,
    /// Until the VM has stopped.
    log: Option<Arc<watch::Sender<u64>>>,
    holders: TaskTracker,
    /// One permit: the lane has one user at a time.
    lane: Arc<Semaphore>,
    /// Commands that a template begins with.
    initial: Arc<[InitCommand]>,
    prepared: Option<Box<Prepared>>,
    /// Of whom the answer is awaited.
    asks: Asks,
    /// While it is put to sleep, and until it runs again.
    resting: Option<OwnedSemaphorePermit>,
    ports: Vec<Published>,
    /// Processes that may have to be ended.
    vmm: Option<Process>,
    network: Option<Process>,
    name_server: Option<AbortOnDropHandle<()>>,
    machine: Option<Arc<dyn Machine>>,
    /// Under the connection.
    channel: Option<Channel>,
    /// The command that is under way; a new one ends the old one.
    step: Option<AbortOnDropHandle<()>>,
    /// When this owner took it from another one.
    taken_over: Option<Instant>,
    /// Waits for those who may come back.
    leaving: Option<AbortOnDropHandle<()>>,
    /// Waits for the connection to close.
    loss_watch: Option<AbortOnDropHandle<()>>,
    exit_watch: Option<AbortOnDropHandle<()>>,
    deadlines: Vec<(Deadline, AbortOnDropHandle<()>)>,
}

/// Whether the task goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    GoOn,
    Removed,
}

impl Vm {
    async fn live(mut self, mut inbox: mpsc::UnboundedReceiver<Message>, commands: Vec<Command>) {
        if self.is_taken_over() {
            self.publish_again().await;
            self.answer_names_again().await;
        }
        for command in commands {
            self.carry_out(command);
        }
        self.publish();
        // Its owner ended between its end and its removal.
        let stopped = matches!(self.phase, Phase::Stopped { .. });
        if stopped && self.remove_itself().await == Next::Removed {
            let _ = self.context.events.send(Event::Removed(self.id.clone()));
            return;
        }
        loop {
            let message = tokio::select! {
                biased;
                () = self.context.ended.cancelled() => return,
                message = inbox.recv() => message,
            };
            let Some(message) = message else { return };
            if self.take(message).await == Next::Removed {
                let _ = self.context.events.send(Event::Removed(self.id.clone()));
                return;
            }
        }
    }

    async fn take(&mut self, message: Message) -> Next {
        match message {
            Message::Happened(input) => return self.happened(input).await,
            Message::Prepared(mut prepared) => {
                self.network = prepared.network.as_ref().and_then(Network::process).cloned();
                self.record.network = self.network.as_ref().map(|process| process.record().clone());
                self.record.status.kernel = prepared.kernel.clone();
                self.record.booted = prepared.booted;
                self.ports = std::mem::take(&mut prepared.ports);
                self.record.status.ports = self.ports.iter().map(|port| port.facts.clone()).collect();
                self.record.status.limits = std::mem::take(&mut prepared.limits);
                self.record.status.not_enforced = std::mem::take(&mut prepared.not_enforced);
                self.prepared = Some(prepared);
                return self.happened(Input::Prepared).await;
            }
            Message::Launched(process, boot, refused) => {
                self.record.status.not_enforced.extend(refused);
                self.record.stage = ledger::Stage::Booting { vmm: process.record().clone() };
                self.record.status.vmm_pid = Some(process.pid());
                self.vmm = Some(process.clone());
                // Nothing of it is left after a crash of this machine, and until then it is known.
                self.write_unsynced().await;
                self.boot(boot, process);
            }
            Message::Attached(machine) => {
                self.machine = Some(Arc::clone(&machine));
                let messages = self.messages.clone();
                let evidence = Evidence::of(&self.record, &self.context.store);
                self.exit_watch = Some(spawn(async move {
                    let end = evidence.explain(machine.ended().await);
                    let _ = messages.send(Message::Happened(Input::VmmEnded(end)));
                }));
                self.attached();
                self.look_at_balloon();
                let input = match self.record.origin {
                    Origin::Boot => Input::Spawned,
                    Origin::Snapshot { .. } => Input::Loaded,
                };
                return self.happened(input).await;
            }
            Message::Answered(connection, agent, channel) => {
                self.record.status.agent = Some(agent);
                self.reached(connection, channel);
                let input = match self.phase {
                    Phase::Reconnecting | Phase::Finding => Input::ChannelBack,
                    _ => Input::Answered,
                };
                return self.happened(input).await;
            }
            Message::Woken(connection, agent, channel, times) => {
                self.record.status.agent = Some(agent);
                self.record.status.wake = Some(times);
                self.find_out_working_set();
                self.reached(connection, channel);
                return self.happened(Input::Woken).await;
            }
            Message::Activate(activation) => return self.asked_to_activate(activation).await,
            Message::Save(save) => return self.asked_to_save(save).await,
            Message::Pause(ask) => return self.asked_to_pause(ask).await,
            Message::Resume(ask) => return self.asked_to_resume(ask).await,
            Message::Saved(saved) => {
                self.asks.saved(saved);
                return self.happened(Input::Saved).await;
            }
            Message::Balloon(facts) => {
                self.record.status.balloon = Some(facts);
                self.publish();
            }
            Message::Lost(lost) => self.lost(lost).await,
            // Without a machine the answer is dropped, and that is one.
            Message::Machine(answer) => drop(self.machine.clone().map(|machine| answer.send(machine))),
            Message::Leave => return self.leave().await,
            Message::Remove(answer) => match self.remove().await {
                Ok(()) => {
                    let _ = answer.send(Ok(()));
                    return Next::Removed;
                }
                Err(error) => {
                    let _ = answer.send(Err(error));
                }
            },
        }
        Next::GoOn
    }

    async fn happened(&mut self, input: Input) -> Next {
        let before = self.phase.clone();
        let times = Times { answer: self.driver.answer_deadline() };
        self.note(&input);
        let (phase, commands) = self.phase.clone().on(input.clone(), times);
        self.phase = phase;
        if self.phase != before {
            tracing::debug!(vm = %self.id, ?input, phase = ?self.phase, "phase");
            self.keep(&before).await;
        }
        for command in commands {
            self.carry_out(command);
        }
        let stopped = matches!(self.phase, Phase::Stopped { .. }) && before != self.phase;
        // Removed before it is said to have stopped: who waits for the end of such a VM finds nothing of it.
        let next = if stopped { self.remove_itself().await } else { Next::GoOn };
        self.publish();
        self.settle(&input);
        if stopped {
            tracing::info!(vm = %self.id, outcome = ?self.phase.outcome(), "stopped");
        }
        next
    }

    /// What a machine that has just been attached to was attached to for, if another owner had it before.
    fn attached(&mut self) {
        match self.phase {
            Phase::Reconnecting | Phase::Finding => self.greet(),
            Phase::Waking => self.wake(),
            Phase::Pausing => self.pause(),
            Phase::Rousing => self.rouse(),
            _ => {}
        }
    }

    /// The guest can be used from here on.
    fn reached(&mut self, connection: Connection, channel: Channel) {
        self.channel = Some(channel);
        self.connection.send_replace(Some(connection.clone()));
        let guest = self.guest();
        self.loss_watch = Some(spawn(async move {
            connection.closed().await;
            guest.broken(&connection, Input::ChannelLost).await;
        }));
    }

    /// Whether it lives and was another owner's, as long as nothing has happened to it here.
    fn is_taken_over(&self) -> bool {
        matches!(
            self.phase,
            Phase::Reconnecting | Phase::Finding | Phase::Dormant | Phase::Pausing | Phase::Rousing
        )
    }
}

/// Memory that is promised to a VM while it lives, its monitor included.
pub(crate) fn need(origin: &Origin, memory: Memory, driver: &dyn Driver) -> u64 {
    let guest = match origin {
        Origin::Boot => memory.bytes(),
        Origin::Snapshot { .. } => admission::private_estimate(memory.bytes()),
    };
    guest + driver.overhead_bytes()
}

/// A task that ends with its handle.
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

/// A task after a time.
fn after(time: Duration, messages: mpsc::UnboundedSender<Message>, input: Input) -> AbortOnDropHandle<()> {
    spawn(async move {
        tokio::time::sleep(time).await;
        let _ = messages.send(Message::Happened(input));
    })
}
