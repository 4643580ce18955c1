//! What a guest does for a snapshot and after one: it falls asleep, and wakes as the machine it was or as a new one.
//!
//! ```text
//!            Sleep                         Wake(same), or its host is gone
//!   awake ──────────► asleep: all frozen ───────────────────────────────────► awake
//!     ▲                      │ Wake(new)
//!     └── thawed ◄── repaired in order, the connections of hosts before ended
//! ```
//! A machine that is awake does not become another one: what has run in it cannot be repaired.
//!
//! One task owns this, so a host that hangs up in the middle of a call stops nothing halfway. That a machine is made of a
//! snapshot is said by its host and never guessed; until it is said, nothing but the agent runs in it, which needs no
//! random number for that.

mod clock;
mod connections;
mod entropy;
mod environment;
mod freezer;
mod gate;
mod generation;
mod hooks;
mod identity;
mod network;
mod repairs;
mod wanted;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use imp_protocol::causes::chain;
use imp_protocol::guest::restore_server::Restore;
use imp_protocol::guest::{SleepRequest, SleepResponse, WakeRequest, WakeResponse};
use imp_sys::signals::Number;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep_until, timeout};
use tonic::{Request, Response, Status};

use self::clock::HostTime;
pub(crate) use self::environment::Inherited;
use self::freezer::Freezer;
pub(crate) use self::gate::Gate;
use self::generation::Generation;
use self::repairs::{Repairs, Surroundings};
use self::wanted::{Identity, Wake};
use crate::conversations::{Conversation, Conversations};
use crate::log;
use crate::processes::{Life, Scope, Table};

/// Time that processes, and then what they have written, get to come to rest.
const REST: Duration = Duration::from_secs(10);
/// A host that asks while another one's question is dealt with waits.
const WAITING: usize = 4;

/// The service as one conversation has it.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    orders: mpsc::Sender<Order>,
    conversation: Conversation,
}

/// The way to the task that owns the machine's sleep.
#[derive(Debug, Clone)]
pub(crate) struct AfterRestore {
    orders: mpsc::Sender<Order>,
}

#[derive(Debug)]
enum Order {
    Sleep {
        at_most: Option<Duration>,
        answer: oneshot::Sender<Result<SleepResponse, Status>>,
    },
    Wake {
        wake: Wake,
        time: HostTime,
        conversation: Conversation,
        answer: oneshot::Sender<Result<WakeResponse, Status>>,
    },
}

/// What is put to sleep and repaired.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Root of the cgroup hierarchy; none for an agent that is not alone in its machine.
    pub(crate) hierarchy: Option<PathBuf>,
    /// The cgroup below which the agent starts processes.
    pub(crate) processes_cgroup: Option<PathBuf>,
    pub(crate) processes: Arc<Table>,
    pub(crate) conversations: Arc<Conversations>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) inherited: Arc<Inherited>,
    /// /dev/null.
    pub(crate) null: File,
}

impl AfterRestore {
    /// Starts the task, which ends when nobody can ask it for anything any more.
    pub(crate) fn start(machine: Machine) -> Self {
        let (orders, received) = mpsc::channel(WAITING);
        let hierarchy: Option<&Path> = machine.hierarchy.as_deref();
        let freezer = Freezer::new(hierarchy, machine.processes_cgroup.clone());
        if hierarchy.is_some() {
            freezer.thaw_leftovers();
        }
        let owner =
            Owner { freezer: Arc::new(freezer), machine: Arc::new(machine), asleep: None, woken: None };
        tokio::spawn(owner.run(received));
        Self { orders }
    }

    pub(crate) fn service(&self, conversation: Conversation) -> Service {
        Service { orders: self.orders.clone(), conversation }
    }
}

#[tonic::async_trait]
impl Restore for Service {
    async fn sleep(&self, request: Request<SleepRequest>) -> Result<Response<SleepResponse>, Status> {
        let milliseconds = request.into_inner().at_most_milliseconds;
        let at_most = (milliseconds > 0).then(|| Duration::from_millis(milliseconds));
        self.ask(|answer| Order::Sleep { at_most, answer }).await
    }

    async fn wake(&self, request: Request<WakeRequest>) -> Result<Response<WakeResponse>, Status> {
        let (wake, time) = wanted::parse(request.into_inner(), Instant::now())
            .map_err(|error| Status::invalid_argument(chain(&error)))?;
        let conversation = self.conversation;
        self.ask(|answer| Order::Wake { wake, time, conversation, answer }).await
    }
}

impl Service {
    async fn ask<T>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, Status>>) -> Order,
    ) -> Result<Response<T>, Status> {
        let lost = || Status::internal("the agent failed in this call; others go on");
        let (answer, answered) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_| lost())?;
        Ok(Response::new(answered.await.map_err(|_| lost())??))
    }
}

struct Owner {
    machine: Arc<Machine>,
    freezer: Arc<Freezer>,
    asleep: Option<Asleep>,
    /// The last wake as a new machine, and what it was answered.
    woken: Option<(Generation, WakeResponse)>,
}

#[derive(Debug, Clone, Copy)]
struct Asleep {
    frozen: u32,
    /// The monotonic clock at that time.
    since: Duration,
    /// When its host must be gone.
    until: Option<tokio::time::Instant>,
}

impl Owner {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            let until = self.asleep.and_then(|asleep| asleep.until);
            let order = tokio::select! {
                biased;
                order = orders.recv() => order,
                () = at(until) => {
                    log::warn(format_args!("no host has woken this machine: it goes on as it was"));
                    self.thaw().await;
                    continue;
                }
            };
            // Whoever asked may have hung up; what was asked for is done.
            match order {
                None => return,
                Some(Order::Sleep { at_most, answer }) => {
                    let _ = answer.send(self.sleep(at_most).await);
                }
                Some(Order::Wake { wake: Wake::Same, time, answer, .. }) => {
                    let _ = answer.send(self.wake_as_it_was(time).await);
                }
                Some(Order::Wake { wake: Wake::New(identity), time, conversation, answer }) => {
                    let _ = answer.send(self.wake_as(*identity, time, conversation).await);
                }
            }
        }
    }

    async fn sleep(&mut self, at_most: Option<Duration>) -> Result<SleepResponse, Status> {
        let frozen = match self.asleep {
            Some(asleep) => asleep.frozen,
            None => match self.come_to_rest().await {
                Ok(frozen) => frozen,
                Err(status) => {
                    self.thaw().await;
                    return Err(status);
                }
            },
        };
        let until = at_most.and_then(|time| tokio::time::Instant::now().checked_add(time));
        self.asleep = Some(Asleep { frozen, since: clock::monotonic(), until });
        Ok(SleepResponse { frozen })
    }

    /// No process starts, all others stand still, and what they have written is on the disks.
    async fn come_to_rest(&self) -> Result<u32, Status> {
        let late = |what: &str| {
            Status::deadline_exceeded(format!("{what} within {} s; the machine goes on", REST.as_secs()))
        };
        let deadline = Instant::now() + REST;
        timeout(REST, self.machine.gate.close())
            .await
            .map_err(|_| late("the start of a process did not end"))?;
        let freezer = Arc::clone(&self.freezer);
        let frozen =
            crate::blocking(move || freezer.freeze(deadline)).await?.map_err(|error| match error {
                freezer::Error::NoCgroups => Status::failed_precondition(chain(&error)),
                freezer::Error::Late { .. } => Status::deadline_exceeded(chain(&error)),
                freezer::Error::Cgroup { .. } | freezer::Error::Restless => Status::aborted(chain(&error)),
            })?;
        let left = deadline.saturating_duration_since(Instant::now());
        timeout(left, crate::blocking(rustix::fs::sync))
            .await
            .map_err(|_| late("the disks did not take what was written"))??;
        Ok(frozen)
    }

    async fn wake_as_it_was(&mut self, time: HostTime) -> Result<WakeResponse, Status> {
        let since = self.asleep.map(|asleep| asleep.since);
        let repairs = Repairs::of_same_machine(time, since);
        tell(&repairs);
        let thawed = self.thaw().await;
        Ok(answer(repairs, thawed))
    }

    async fn wake_as(
        &mut self,
        identity: Identity,
        time: HostTime,
        conversation: Conversation,
    ) -> Result<WakeResponse, Status> {
        if self.asleep.is_none()
            && let Some((_, answered)) =
                self.woken.as_ref().filter(|(generation, _)| *generation == identity.generation)
        {
            tell(&Repairs::of_same_machine(time, None));
            return Ok(WakeResponse { unix_time_nanoseconds: clock::wall(), ..answered.clone() });
        }
        let asleep = self.asleep.as_mut().ok_or_else(has_gone_on)?;
        // Nothing runs before it is repaired, however long that takes.
        asleep.until = None;
        let asleep_since = asleep.since;
        self.machine.conversations.end_all_but(conversation);
        let (machine, freezer) = (Arc::clone(&self.machine), Arc::clone(&self.freezer));
        let generation = identity.generation.clone();
        let repairs = crate::blocking(move || {
            kill_what_streams_held(&machine.processes);
            let surroundings = Surroundings {
                time,
                asleep_since,
                processes: freezer.members(),
                inherited: &machine.inherited,
                null: &machine.null,
                hooks_cgroup: freezer.hooks(),
            };
            Repairs::of_new_machine(&identity, &surroundings)
        })
        .await?;
        tell(&repairs);
        if !repairs.are_enough() {
            log::error(format_args!("this machine is not fit for use after its restore: it stays asleep"));
            return Ok(answer(repairs, 0));
        }
        let thawed = self.thaw().await;
        let answered = answer(repairs, thawed);
        log::info(format_args!("awake as {}", generation.as_str()));
        self.woken = Some((generation, answered.clone()));
        Ok(answered)
    }

    async fn thaw(&mut self) -> u32 {
        self.asleep = None;
        let freezer = Arc::clone(&self.freezer);
        let thawed = crate::blocking(move || freezer.thaw()).await.unwrap_or_default();
        self.machine.gate.open();
        thawed
    }
}

/// Its host was too slow, or is another one: what ran meanwhile took itself for the machine before.
fn has_gone_on() -> Status {
    Status::failed_precondition(
        "this machine does not sleep: its processes run, unrepaired, as those of the machine before; end it",
    )
}

async fn at(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Their hosts are those of the machine before. Frozen, they end without another step.
fn kill_what_streams_held(processes: &Table) {
    for process in processes.running() {
        if process.life == Life::OfItsStream {
            process.signal(Number::KILL, Scope::Tree);
        }
    }
}

fn tell(repairs: &Repairs) {
    for (repair, why) in repairs.failures() {
        log::warn(format_args!("not repaired after the restore: {repair}: {why}"));
    }
}

fn answer(repairs: Repairs, thawed: u32) -> WakeResponse {
    WakeResponse { repairs: repairs.into_answer(), thawed, unix_time_nanoseconds: clock::wall() }
}
