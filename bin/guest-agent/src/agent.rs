//! The agent process: what it knows, the services it offers, and the life of its connection to the host.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use imp_protocol::guest::files_server::FilesServer;
use imp_protocol::guest::machine_server::MachineServer;
use imp_protocol::guest::ports_server::PortsServer;
use imp_protocol::guest::processes_server::ProcessesServer;
use imp_protocol::guest::restore_server::RestoreServer;
use imp_sys::signals;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status};

use crate::after_restore::{self, AfterRestore, Gate, Inherited};
use crate::channel::{self, Channel};
use crate::conversations::{Conversation, Conversations};
use crate::init::arguments::{self, Arguments, Role};
use crate::init::handover::Supervisor;
use crate::lane::Lane;
use crate::processes::{Forest, Table};
use crate::shutdown::{self, PowerOff};
use crate::{log, readiness};

/// Threads for work that blocks; they end when they are idle.
const BLOCKING_THREADS: usize = 16;
const THREAD_STACK: usize = 256 << 10;
/// Archives packed or unpacked at the same time: each holds a blocking thread for as long as the host takes.
const ARCHIVES: usize = 6;
/// A host that says nothing for so long after the main process has ended has lost this machine.
const ABANDONED: Duration = Duration::from_secs(600);
/// Free memory that is kept for the next chunk of a transfer.
const KEPT_MEMORY: u32 = 8 << 20;
/// Time without a call after which free memory is given back.
const IDLE: Duration = Duration::from_secs(5);
/// Time that processes get when nobody says how long.
const GRACE: Duration = Duration::from_secs(10);
/// Open files that processes may have: soft, as programs that loop over all of them expect, and hard.
const OPEN_FILES: (u64, u64) = (65_536, 1 << 20);

/// What the agent was given by the machine it runs in.
#[derive(Debug, Default)]
pub struct Surroundings {
    /// Directory of a cgroup2 file system below which each process gets a cgroup.
    pub cgroups: Option<PathBuf>,
    /// Root of the cgroup2 hierarchy, all of which sleeps for a snapshot; none for an agent that shares its machine.
    pub hierarchy: Option<PathBuf>,
    /// Root of the VM's private disk.
    pub scratch: Option<OwnedFd>,
    /// PID 1.
    pub supervisor: Option<Supervisor>,
    /// How the machine is ended; none in a test.
    pub power_off: Option<PowerOff>,
}

#[derive(Debug)]
pub struct Agent {
    processes: Arc<Table>,
    forest: Forest,
    /// /dev/null, opened while it was sure to be there.
    null: File,
    scratch: Option<OwnedFd>,
    supervisor: Option<Supervisor>,
    power_off: Option<PowerOff>,
    shutdown: Mutex<Shutdown>,
    started: Instant,
    /// Milliseconds since the start at which the host last asked for anything.
    heard: AtomicU64,
    archives: Semaphore,
    lane: Lane,
    conversations: Arc<Conversations>,
    gate: Arc<Gate>,
    inherited: Arc<Inherited>,
    after_restore: AfterRestore,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shutdown {
    NotAsked,
    UnderWay,
}

/// The agent as the services see it.
#[derive(Debug, Clone)]
pub(crate) struct Guest(pub(crate) Arc<Agent>);

impl std::ops::Deref for Guest {
    type Target = Arc<Agent>;

    fn deref(&self) -> &Arc<Agent> {
        &self.0
    }
}

impl Agent {
    /// Must be called in a runtime of tokio: it starts a task.
    pub fn new(surroundings: Surroundings) -> std::io::Result<Arc<Self>> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let processes = Arc::<Table>::default();
        let conversations = Arc::<Conversations>::default();
        let (gate, inherited) = (Arc::<Gate>::default(), Arc::<Inherited>::default());
        let after_restore = AfterRestore::start(after_restore::Machine {
            hierarchy: surroundings.hierarchy,
            processes_cgroup: surroundings.cgroups.clone(),
            processes: Arc::clone(&processes),
            conversations: Arc::clone(&conversations),
            gate: Arc::clone(&gate),
            inherited: Arc::clone(&inherited),
            null: null.try_clone()?,
        });
        Ok(Arc::new(Self {
            processes,
            forest: Forest::new(surroundings.cgroups),
            null,
            scratch: surroundings.scratch,
            supervisor: surroundings.supervisor,
            power_off: surroundings.power_off,
            shutdown: Mutex::new(Shutdown::NotAsked),
            started: Instant::now(),
            heard: AtomicU64::new(0),
            archives: Semaphore::new(ARCHIVES),
            lane: Lane::default(),
            conversations,
            gate,
            inherited,
            after_restore,
        }))
    }

    /// All services, for one connection.
    pub fn routes(self: &Arc<Self>) -> Routes {
        self.routes_of(self.conversations.begin())
    }

    pub(crate) fn routes_of(self: &Arc<Self>, conversation: Conversation) -> Routes {
        let agent = Arc::clone(self);
        let heard = move |request: Request<()>| -> Result<Request<()>, Status> {
            agent.heard.store(agent.milliseconds(), Ordering::Relaxed);
            Ok(request)
        };
        let agent = Arc::clone(self);
        let awake = {
            let heard = heard.clone();
            move |request: Request<()>| -> Result<Request<()>, Status> {
                agent.gate.check()?;
                heard(request)
            }
        };
        let guest = Guest(Arc::clone(self));
        let restore = self.after_restore.service(conversation);
        Routes::new(InterceptedService::new(MachineServer::new(guest.clone()), heard.clone()))
            .add_service(InterceptedService::new(RestoreServer::new(restore), heard))
            .add_service(InterceptedService::new(ProcessesServer::new(guest.clone()), awake.clone()))
            .add_service(InterceptedService::new(FilesServer::new(guest.clone()), awake.clone()))
            .add_service(InterceptedService::new(PortsServer::new(guest), awake))
    }

    pub(crate) fn conversations(&self) -> &Arc<Conversations> {
        &self.conversations
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Variables that every process gets.
    pub(crate) fn inherited(&self) -> &Inherited {
        &self.inherited
    }

    pub(crate) fn processes(&self) -> &Arc<Table> {
        &self.processes
    }

    pub(crate) fn forest(&self) -> &Forest {
        &self.forest
    }

    pub(crate) fn null(&self) -> &File {
        &self.null
    }

    pub(crate) fn scratch(&self) -> Option<&OwnedFd> {
        self.scratch.as_ref()
    }

    pub(crate) fn supervisor(&self) -> Option<&Supervisor> {
        self.supervisor.as_ref()
    }

    pub(crate) fn archives(&self) -> &Semaphore {
        &self.archives
    }

    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Serves archives over this port, a non-blocking device or socket, until it fails.
    pub async fn serve_lane(&self, port: OwnedFd) -> std::io::Result<()> {
        self.lane.serve(port).await
    }

    /// Serves one host's archives over a stream of its own.
    pub async fn serve_lane_stream(&self, stream: UnixStream) -> std::io::Result<()> {
        self.lane.serve_stream(stream).await
    }

    /// Ends the machine, once, in a task of its own.
    pub(crate) fn shut_down(self: &Arc<Self>, grace: Duration) {
        {
            let mut state = self.shutdown.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::replace(&mut *state, Shutdown::UnderWay) == Shutdown::UnderWay {
                return;
            }
        }
        let Some(power_off) = self.power_off else { return };
        let agent = Arc::clone(self);
        tokio::spawn(async move { shutdown::end_machine(&agent, grace, power_off).await });
    }

    /// The host acknowledges the end of the main process and asks for the machine's; a host that is gone does neither.
    pub(crate) fn main_ended(self: &Arc<Self>) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let mut quiet_since = agent.milliseconds();
            loop {
                let quiet = Duration::from_millis(agent.milliseconds() - quiet_since);
                let Some(left) = ABANDONED.checked_sub(quiet).filter(|left| !left.is_zero()) else { break };
                tokio::time::sleep(left).await;
                quiet_since = quiet_since.max(agent.heard.load(Ordering::Relaxed));
            }
            log::warn(format_args!("no word from the host since the main process ended: powering off"));
            agent.shut_down(Duration::ZERO);
        });
    }

    fn milliseconds(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Runs the agent process that PID 1 has started, until the machine ends.
pub fn main(words: impl Iterator<Item = String>) -> Result<(), Error> {
    log::open();
    crate::init::stage("execution of the agent");
    let arguments = arguments::parse(words)?;
    if arguments.role == Role::Keeper {
        return crate::init::keep(arguments).map_err(Error::Start);
    }
    let limit = rustix::process::Rlimit { current: Some(OPEN_FILES.0), maximum: Some(OPEN_FILES.1) };
    // The kernel's own limits serve too, for fewer processes at once.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // The signal mask is inherited by all threads, so that no handler ever runs: see `imp_sys::child`.
    let signals = signals::block_all(&[signals::Number::TERM.get()]).map_err(Error::Start)?;
    imp_sys::heap::keep(KEPT_MEMORY);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(THREAD_STACK)
        .thread_keep_alive(Duration::from_secs(2))
        .build()
        .map_err(Error::Start)?;
    runtime.block_on(serve(arguments, signals))
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Arguments(#[from] arguments::Error),
    #[error("the agent could not start")]
    Start(#[source] std::io::Error),
    #[error("the channel to the host is lost")]
    Channel(#[from] channel::Error),
}

async fn serve(arguments: Arguments, signals: signals::SignalQueue) -> Result<(), Error> {
    let channel = Channel::open(arguments.channel)?;
    let agent = Agent::new(Surroundings {
        // `/imp/exec` below it.
        hierarchy: arguments.cgroups.ancestors().nth(2).map(PathBuf::from),
        cgroups: Some(arguments.cgroups),
        scratch: arguments.scratch,
        supervisor: arguments.companion.map(|socket| Supervisor::new(socket.into())),
        power_off: Some(arguments.power_off),
    })
    .map_err(Error::Start)?;
    if arguments.role == Role::AgentBesideInit {
        agent.processes().knows_init().map_err(|error| Error::Start(std::io::Error::other(error)))?;
    }
    let pending = signals.as_fd().try_clone_to_owned().and_then(readiness::readable).map_err(Error::Start)?;
    let asked = Arc::clone(&agent);
    tokio::spawn(async move {
        while let Ok(mut ready) = pending.readable().await {
            match signals.next() {
                // PID 1 passes on the power button and Ctrl-Alt-Delete.
                Ok(Some(_)) => asked.shut_down(GRACE),
                Ok(None) | Err(_) => ready.clear_ready(),
            }
        }
    });
    crate::init::stage("agent");
    tokio::spawn(give_memory_back(Arc::clone(&agent)));
    Ok(channel.serve(&agent).await?)
}

/// Transfers leave megabytes of free heap behind, which the guest's processes can use better.
async fn give_memory_back(agent: Arc<Agent>) {
    let mut given_back = 0;
    loop {
        tokio::time::sleep(IDLE).await;
        let heard = agent.heard.load(Ordering::Relaxed);
        let idle = u128::from(agent.milliseconds() - heard.min(agent.milliseconds())) >= IDLE.as_millis();
        if idle && heard != given_back {
            imp_sys::heap::give_back();
            given_back = heard;
        }
    }
}
