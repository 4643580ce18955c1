//! One Firecracker process: started without a machine, given one over its API, or taken over from another owner.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use imp_protocol::lane;
use imp_sys::spawn::{Program, spawn_detached};
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::api::{self, Request, Session};
use super::channel::{self, Knock};
use super::config::{self, CHANNEL_PORT};
use super::exit;
use super::jail::{self, Streams};
use super::room::{self, Room};
use super::version::Clock;
use super::{MIB, mark};
use crate::console::{Recorder, Sign};
use crate::layout::VmLayout;
use crate::process::Process;
use crate::status::{BalloonFacts, VmmEnd};
use crate::vmm::snapshot::{SnapshotFiles, SnapshotKind};
use crate::vmm::{BootConfig, Error, Machine, NotLoaded, Origin, inside, namespace};

/// What the last words of a process and its guest may take to be written down once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// One that does not has stopped, or a guest that keeps its processor busy.
const SAYS_ITS_STATE: Duration = Duration::from_secs(10);
/// A call does without the lane of a guest that takes longer.
const LANE_ANSWERS: Duration = Duration::from_secs(1);
/// By then the kernel of a guest that runs has answered, whatever its programs do.
const STILL_RUNS: Duration = Duration::from_secs(2);

/// Starts the process. It has no machine yet, and waits for orders.
pub(super) fn spawn(
    program: &Path,
    jailer: Option<&Path>,
    boot: &BootConfig,
    vm: &VmLayout,
) -> Result<Process, Error> {
    // What cannot be had is refused before anything runs.
    config::begin(boot, Clock::Unsaid)?;
    let program =
        fs::canonicalize(program).map_err(|source| Error::Open { path: program.to_owned(), source })?;
    let jail = jailer.zip(boot.user);
    let room = match jail {
        Some((_, user)) => Room::jail(jail::root(&vm.jail(), &program, &boot.id), user),
        None => Room::open(vm),
    };
    room.furnish(boot)?;
    let streams = Streams {
        null: open(Path::new("/dev/null"), OpenOptions::new().read(true))?,
        console: room.console_for_writing()?,
        log: open(&vm.vmm_log(), OpenOptions::new().create(true).append(true))?,
    };
    if let Some((jailer, user)) = jail {
        return jail::spawn(jailer, &program, user, boot, &room, vm, &streams);
    }
    let start = || {
        spawn_detached(&Program {
            path: &program,
            arguments: &arguments(&boot.id),
            environment: &[],
            directory: Some(room.path()),
            stdin: streams.null.as_fd(),
            stdout: streams.console.as_fd(),
            stderr: streams.log.as_fd(),
            inherited: &[],
        })
    };
    let pid = inside(namespace(boot), start)?
        .map_err(|source| Error::Spawn { program: program.clone(), source })?;
    Process::of_child(pid).map_err(Error::Hold)
}

/// Seccomp filters are on unless they are switched off.
fn arguments(id: &str) -> Vec<OsString> {
    let mark = mark(id);
    [
        "--id",
        &mark,
        "--api-sock",
        room::API,
        "--log-path",
        room::LOG,
        "--level",
        "Warning",
        "--metrics-path",
        room::METRICS,
    ]
    .map(OsString::from)
    .to_vec()
}

fn open(path: &Path, options: &OpenOptions) -> Result<File, Error> {
    options.open(path).map_err(|source| Error::Open { path: path.to_owned(), source })
}

/// Gives a new process its machine.
pub(super) async fn begin(
    boot: &BootConfig,
    clock: Clock,
    vm: &VmLayout,
    process: Process,
) -> Result<Box<dyn Machine>, Error> {
    let room = Room::of_running(vm)?;
    let knock = match boot.origin {
        Origin::Boot(_) => Some(listen(&room)?),
        Origin::Snapshot(_) => None,
    };
    let machine = FirecrackerMachine::hold(vm, process, knock)?;
    let log = vm.vmm_log();
    let mut api = Session::open_new(&room.api(), &machine.process, &log).await.map_err(Error::Api)?;
    for request in config::begin(boot, clock)? {
        api.make(request).await.map_err(|error| match error {
            api::Error::Refused { call, fault } if call.path == config::LOAD => {
                Error::NotLoaded(NotLoaded::Refused { said: fault })
            }
            error => Error::Api(error),
        })?;
    }
    Ok(Box::new(machine))
}

/// Firecracker connects to it when the guest knocks.
fn listen(room: &Room) -> Result<Knock, Error> {
    let path = room.knock(CHANNEL_PORT);
    let knock = Knock::listen(&path).map_err(Error::Vsock)?;
    if let Some(user) = room.user() {
        jail::give(&path, user).map_err(Error::Jail)?;
    }
    Ok(knock)
}

/// Takes over a machine that another owner has begun. A process without one never gets it: whoever was about to give it one is
/// gone.
pub(super) async fn adopt(vm: &VmLayout, process: Process) -> Result<Box<dyn Machine>, Error> {
    let machine = FirecrackerMachine::hold(vm, process, None)?;
    let asked = async {
        let mut api = Session::open_new(&machine.room.api(), &machine.process, &vm.vmm_log()).await?;
        api.ask::<Instance>("/").await
    };
    match timeout(SAYS_ITS_STATE, asked).await {
        Ok(Ok(Instance { state: InstanceState::NotStarted })) => return Err(Error::NeverBegun),
        Ok(Ok(Instance { state: InstanceState::Running | InstanceState::Paused })) => {}
        // Its guest may be well all the same.
        Ok(Err(error)) => tracing::warn!(%error, "a Firecracker that was taken over does not say its state"),
        Err(_) => tracing::warn!("a Firecracker that was taken over does not say its state in time"),
    }
    Ok(Box::new(machine))
}

/// What a Firecracker says of itself.
#[derive(Deserialize)]
struct Instance {
    state: InstanceState,
}

#[derive(Deserialize)]
enum InstanceState {
    #[serde(rename = "Not started")]
    NotStarted,
    Running,
    Paused,
}

#[derive(Deserialize)]
struct BalloonStatistics {
    target_mib: u64,
    actual_mib: u64,
}

struct FirecrackerMachine {
    room: Room,
    process: Process,
    /// Until the guest has been reached.
    knock: Option<Knock>,
    console: Recorder,
    /// Read and kept within bounds as long as somebody owns the machine; without a reader Firecracker drops what it would say.
    _log: Recorder,
    _metrics: Recorder,
    halted: Arc<AtomicBool>,
    _halt: AbortOnDropHandle<()>,
}

impl FirecrackerMachine {
    fn hold(vm: &VmLayout, process: Process, knock: Option<Knock>) -> Result<Self, Error> {
        let room = Room::of_running(vm)?;
        let console = Recorder::start(room.console()?, vm.console(), vm.earlier_console());
        let log = Recorder::start(room.read(room::LOG)?, vm.vmm_log(), vm.earlier_vmm_log());
        let metrics = Recorder::start(room.read(room::METRICS)?, vm.vmm_metrics(), vm.earlier_vmm_metrics());
        let halted = Arc::new(AtomicBool::new(false));
        let halt = tokio::spawn(end_when_halted(
            room.clone(),
            process.clone(),
            console.signs(),
            Arc::clone(&halted),
        ));
        Ok(Self {
            room,
            process,
            knock,
            console,
            _log: log,
            _metrics: metrics,
            halted,
            _halt: AbortOnDropHandle::new(halt),
        })
    }
}

/// A guest that has switched itself off leaves a machine that runs and does nothing: it is ended here. A program in the
/// guest can print the same words; then its kernel still answers.
async fn end_when_halted(
    room: Room,
    process: Process,
    mut signs: tokio::sync::watch::Receiver<Option<Sign>>,
    halted: Arc<AtomicBool>,
) {
    loop {
        let sign = *signs.borrow_and_update();
        if sign == Some(Sign::Halted) {
            let answer = channel::connect(&room.vsock(), CHANNEL_PORT, STILL_RUNS).await;
            if matches!(answer, Err(channel::Error::Silent { .. })) {
                halted.store(true, Ordering::SeqCst);
                process.kill();
                return;
            }
        }
        if signs.changed().await.is_err() {
            return;
        }
    }
}

impl FirecrackerMachine {
    async fn session(&self) -> Result<Session, Error> {
        Session::open(&self.room.api()).await.map_err(Error::Api)
    }

    async fn order(&self, request: Request) -> Result<(), Error> {
        self.session().await?.make(request).await.map_err(Error::Api)
    }
}

impl Machine for FirecrackerMachine {
    fn connect_channel(&self, patience: Duration) -> BoxFuture<'_, Result<UnixStream, Error>> {
        Box::pin(async move {
            if let Some(knock) = &self.knock {
                knock.heard().await;
            }
            channel::connect(&self.room.vsock(), CHANNEL_PORT, patience).await.map_err(Error::Vsock)
        })
    }

    fn connect_lane(&self) -> BoxFuture<'_, Result<Option<UnixStream>, Error>> {
        Box::pin(async move {
            let port = lane::vsock_port(CHANNEL_PORT);
            match channel::connect(&self.room.vsock(), port, LANE_ANSWERS).await {
                Ok(stream) => Ok(Some(stream)),
                // An agent without a lane, or a guest that was restored a moment ago and drops its first connections.
                Err(channel::Error::Refused | channel::Error::Silent { .. }) => Ok(None),
                Err(error) => Err(Error::Vsock(error)),
            }
        })
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.order(config::pause()))
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.order(config::resume()))
    }

    fn balloon(&self) -> BoxFuture<'_, Result<Option<BalloonFacts>, Error>> {
        Box::pin(async {
            match self.session().await?.ask::<BalloonStatistics>(config::BALLOON_STATISTICS).await {
                Ok(BalloonStatistics { target_mib, actual_mib }) => Ok(Some(BalloonFacts {
                    wanted_bytes: target_mib.saturating_mul(MIB),
                    // The guest says it, whatever it likes.
                    given_bytes: actual_mib.saturating_mul(MIB),
                })),
                Err(api::Error::Refused { .. }) => Ok(None),
                Err(error) => Err(Error::Api(error)),
            }
        })
    }

    fn inflate(&self, bytes: u64) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.order(config::inflate(bytes / MIB)))
    }

    fn snapshot<'a>(&'a self, kind: SnapshotKind, to: &'a SnapshotFiles) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            self.order(config::snapshot(kind)).await?;
            match kind {
                SnapshotKind::Full => self.room.take_out(room::NEW_MEMORY, &to.memory)?,
                SnapshotKind::Changes => self.room.lend(room::CHANGES, &to.memory)?,
            }
            self.room.take_out(room::NEW_STATE, &to.state)
        })
    }

    fn ended(&self) -> BoxFuture<'_, VmmEnd> {
        Box::pin(async {
            let end = self.process.ended().await;
            if timeout(LAST_WORDS, self.console.finished()).await.is_err() {
                tracing::warn!("a console does not end with its machine");
            }
            let sign = *self.console.signs().borrow();
            of_guest(end, self.halted.load(Ordering::SeqCst), sign)
        })
    }
}

/// Firecracker ends in the same way whatever made its guest end; the guest's kernel said more.
fn of_guest(end: VmmEnd, halted: bool, sign: Option<Sign>) -> VmmEnd {
    if halted {
        return VmmEnd::PoweredOff;
    }
    match (end, sign) {
        (VmmEnd::Exit(0) | VmmEnd::Unknown, Some(Sign::Panicked | Sign::Restarting)) => VmmEnd::Reset,
        (end, _) => exit::told(end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Fault;

    #[test]
    fn a_guest_s_end_is_told_from_that_of_its_process() {
        let gone = VmmEnd::Fault { status: 149, fault: Fault::MemoryGone };
        for (end, halted, sign, told) in [
            (VmmEnd::Exit(149), false, None, gone),
            (VmmEnd::Exit(149), false, Some(Sign::Panicked), gone),
            (VmmEnd::Exit(0), false, Some(Sign::Panicked), VmmEnd::Reset),
            (VmmEnd::Exit(0), false, Some(Sign::Restarting), VmmEnd::Reset),
            (VmmEnd::Unknown, false, Some(Sign::Panicked), VmmEnd::Reset),
            (VmmEnd::Exit(0), false, None, VmmEnd::Exit(0)),
            (VmmEnd::Signal(9), false, Some(Sign::Panicked), VmmEnd::Signal(9)),
            (VmmEnd::Signal(9), false, Some(Sign::Halted), VmmEnd::Signal(9)),
            (VmmEnd::Signal(9), true, Some(Sign::Halted), VmmEnd::PoweredOff),
            (VmmEnd::Unknown, false, None, VmmEnd::Unknown),
        ] {
            assert_eq!(of_guest(end, halted, sign), told, "{end:?} {halted} {sign:?}");
        }
    }
}
