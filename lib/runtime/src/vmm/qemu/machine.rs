//! One QEMU process and its sockets.
//!
//! The sockets listen before QEMU starts and are handed to it, so that nobody polls for their appearance and a stale
//! one of an earlier run is never talked to.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use futures_util::future::BoxFuture;
use imp_protocol::boot::AGAIN;
use imp_protocol::causes::chain;
use imp_sys::spawn::{Program, spawn_detached};
use imp_sys::tap::Frames;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::args::{self, Descriptors, Host};
use super::qmp::{Qmp, Shutdown};
use super::snapshot;
use crate::console::{self, Recorder};
use crate::layout::VmLayout;
use crate::process::Process;
use crate::status::{Accelerator, VmmEnd};
use crate::vmm::snapshot::{SnapshotFiles, SnapshotKind};
use crate::vmm::{Attachment, BootConfig, Error, Machine, NotLoaded, Origin, inside, namespace};

/// An agent that restarts its machine before it has answered gets to boot it again; after so many times the next is its end.
const MOST_RESETS: u32 = 5;
/// How long what a guest wrote before its reset may take to be written down, and how often it is looked for.
const WRITTEN: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(50);
/// What QEMU's last words may take to arrive once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(10);

pub(super) fn spawn(program: &Path, host: Host, boot: &BootConfig, vm: &VmLayout) -> Result<Process, Error> {
    let monitor = listen(&vm.monitor_socket())?;
    let channel = listen(&vm.channel_socket())?;
    let lane = listen(&vm.lane_socket())?;
    let console = listen(&vm.console_socket())?;
    let namespace = namespace(boot);
    let tap = inside(namespace, || open_tap(boot))??;
    let network = tap.as_ref().map(AsFd::as_fd).or_else(|| stream(boot));
    let descriptors = Descriptors {
        monitor: monitor.as_raw_fd(),
        channel: channel.as_raw_fd(),
        lane: lane.as_raw_fd(),
        console: console.as_raw_fd(),
        network: network.map(|descriptor| descriptor.as_raw_fd()),
    };
    let arguments = args::arguments(boot, host, descriptors);
    let mut inherited = vec![monitor.as_fd(), channel.as_fd(), lane.as_fd(), console.as_fd()];
    inherited.extend(network);
    start(program, &arguments, &inherited, namespace, vm)
}

fn stream(boot: &BootConfig) -> Option<BorrowedFd<'_>> {
    match &boot.network.as_ref()?.attachment {
        Attachment::Stream(socket) => Some(socket.as_fd()),
        Attachment::Tap { .. } => None,
    }
}

/// The tap of the namespace that the calling thread is in.
fn open_tap(boot: &BootConfig) -> Result<Option<OwnedFd>, Error> {
    match boot.network.as_ref().map(|network| &network.attachment) {
        Some(Attachment::Tap { name, .. }) => imp_sys::tap::open(name, Frames::WithVirtioHeader)
            .map(Some)
            .map_err(|source| Error::Tap { name: name.clone(), source }),
        Some(Attachment::Stream(_)) | None => Ok(None),
    }
}

fn start(
    program: &Path,
    arguments: &[std::ffi::OsString],
    inherited: &[BorrowedFd<'_>],
    namespace: Option<BorrowedFd<'_>>,
    vm: &VmLayout,
) -> Result<Process, Error> {
    let open = |path: &Path, options: &OpenOptions| {
        options.open(path).map_err(|source| Error::Open { path: path.to_owned(), source })
    };
    let null: File = open(Path::new("/dev/null"), OpenOptions::new().read(true).write(true))?;
    let log: File = open(&vm.vmm_log(), OpenOptions::new().create(true).append(true))?;
    let start = || {
        spawn_detached(&Program {
            path: program,
            arguments,
            environment: &[],
            directory: None,
            stdin: null.as_fd(),
            stdout: log.as_fd(),
            stderr: log.as_fd(),
            inherited,
        })
    };
    let pid =
        inside(namespace, start)?.map_err(|source| Error::Spawn { program: program.to_owned(), source })?;
    Process::of_child(pid).map_err(Error::Hold)
}

/// A socket of an earlier run is removed first: its owner is known to be gone.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    let bound = match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(path),
    };
    bound.map_err(|source| Error::Listen { path: path.to_owned(), source })
}

async fn connect(path: &Path) -> Result<UnixStream, Error> {
    UnixStream::connect(path).await.map_err(|source| Error::Connect { path: path.to_owned(), source })
}

struct QemuMachine {
    process: Process,
    qmp: Qmp,
    console: Recorder,
    vm: VmLayout,
    /// Bounds how often; none where it may not.
    boots_again: Option<AbortOnDropHandle<()>>,
}

/// Lets the guest of a new process boot, or loads its snapshot and leaves it paused.
pub(super) async fn begin(
    boot: &BootConfig,
    accelerator: Accelerator,
    vm: &VmLayout,
    process: Process,
) -> Result<Box<dyn Machine>, Error> {
    match &boot.origin {
        Origin::Boot(_) => {
            let mut machine = attach(vm, process).await?;
            if args::may_boot_again(boot, accelerator) {
                machine.boots_again =
                    Some(AbortOnDropHandle::new(tokio::spawn(bound_resets(machine.qmp.clone(), vm.clone()))));
            }
            Ok(Box::new(machine))
        }
        Origin::Snapshot(files) => {
            let loaded = load(boot, files, vm, &process).await;
            if loaded.is_err() {
                process.kill();
            }
            Ok(Box::new(loaded?))
        }
    }
}

async fn load(
    boot: &BootConfig,
    files: &SnapshotFiles,
    vm: &VmLayout,
    process: &Process,
) -> Result<QemuMachine, Error> {
    let (files, size) = (files.clone(), boot.memory.bytes());
    let state = tokio::task::spawn_blocking(move || snapshot::read(&files, size)).await;
    let state = state.map_err(|_| Error::NotLoaded(NotLoaded::Ended))?;
    let state = state.map_err(|fault| Error::NotLoaded(fault.into()))?;
    let loaded = async {
        let machine = attach(vm, process.clone()).await?;
        snapshot::load(&machine.qmp, &vm.migration_socket(), &state).await.map_err(Error::Monitor)?;
        Ok::<_, Error>(machine)
    };
    match loaded.await {
        Ok(machine) => Ok(machine),
        // A QEMU that cannot load something says why, and ends.
        Err(error) if timeout(LAST_WORDS, process.gone()).await.is_ok() => {
            let said = console::last_lines(&vm.vmm_log(), &vm.earlier_vmm_log(), 1);
            Err(Error::NotLoaded(match said.into_iter().next_back() {
                Some(said) => NotLoaded::Refused { said },
                None => NotLoaded::Machine(Box::new(error)),
            }))
        }
        Err(error) => Err(Error::NotLoaded(NotLoaded::Machine(Box::new(error)))),
    }
}

/// Takes over a machine that runs.
pub(super) async fn adopt(vm: &VmLayout, process: Process) -> Result<Box<dyn Machine>, Error> {
    let machine = attach(vm, process).await?;
    // The owner before may have ended before the guest answered.
    if let Err(error) = end_at_reset(&machine.qmp).await {
        tracing::warn!(console = %vm.console().display(), error = chain(&error), "a reset of the guest may not be its end");
    }
    Ok(Box::new(machine))
}

async fn attach(vm: &VmLayout, process: Process) -> Result<QemuMachine, Error> {
    let console = connect(&vm.console_socket()).await?;
    let console = Recorder::start(console, vm.console(), vm.earlier_console());
    let qmp = Qmp::handshake(connect(&vm.monitor_socket()).await?).await.map_err(Error::Monitor)?;
    Ok(QemuMachine { process, qmp, console, vm: vm.clone(), boots_again: None })
}

/// Whether a machine that was reset so often, so many times of them because its agent wanted it, may be reset once more. One that
/// was reset for another reason, as a kernel that panics does, would be so again.
fn may_boot_again(resets: u32, wanted: u32) -> bool {
    wanted >= resets && resets < MOST_RESETS
}

async fn bound_resets(qmp: Qmp, vm: VmLayout) {
    let mut resets = 0;
    loop {
        resets += 1;
        if !qmp.reset(resets).await {
            return;
        }
        let wanted = wanted_resets(&vm, resets).await;
        tracing::warn!(console = %vm.console().display(), resets, wanted, "the guest boots again");
        if !may_boot_again(resets, wanted) {
            break;
        }
    }
    if let Err(error) = end_at_reset(&qmp).await {
        tracing::warn!(console = %vm.console().display(), error = chain(&error), "the guest may be reset again until its time is over");
    }
}

/// How often the agent has written that it wants a reset, as soon as that is so many times.
async fn wanted_resets(vm: &VmLayout, enough: u32) -> u32 {
    let mut wanted = 0;
    let deadline = Instant::now() + WRITTEN;
    while wanted < enough && Instant::now() < deadline {
        let (now, earlier) = (vm.console(), vm.earlier_console());
        let lines =
            tokio::task::spawn_blocking(move || console::last_lines(&now, &earlier, usize::MAX)).await;
        let announced = lines.iter().flatten().filter(|line| line.contains(AGAIN)).count();
        wanted = u32::try_from(announced).unwrap_or(u32::MAX);
        if wanted < enough {
            sleep(LOOK).await;
        }
    }
    wanted
}

async fn end_at_reset(qmp: &Qmp) -> Result<(), Error> {
    let action = json!({"reboot": "shutdown"});
    qmp.execute_with("set-action", action).await.map(drop).map_err(Error::Monitor)
}

impl QemuMachine {
    /// As QEMU knows it: whoever takes over a machine has no part in how it began.
    async fn memory_size(&self) -> Result<u64, Error> {
        let answer = self.qmp.execute("query-memory-size-summary").await.map_err(Error::Monitor)?;
        answer.get("base-memory").and_then(serde_json::Value::as_u64).ok_or(Error::NoMemorySize)
    }
}

impl Machine for QemuMachine {
    fn connect_channel(&self, _patience: Duration) -> BoxFuture<'_, Result<UnixStream, Error>> {
        Box::pin(async { connect(&self.vm.channel_socket()).await })
    }

    fn connect_lane(&self) -> BoxFuture<'_, Result<Option<UnixStream>, Error>> {
        Box::pin(async {
            let lane = self.vm.lane_socket();
            match UnixStream::connect(&lane).await {
                Ok(stream) => Ok(Some(stream)),
                // Started by an owner that gave its machines none.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(Error::Connect { path: lane, source }),
            }
        })
    }

    fn answered(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            match self.boots_again {
                Some(_) => end_at_reset(&self.qmp).await,
                None => Ok(()),
            }
        })
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { self.qmp.execute("stop").await.map(drop).map_err(Error::Monitor) })
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { self.qmp.execute("cont").await.map(drop).map_err(Error::Monitor) })
    }

    fn snapshot<'a>(&'a self, kind: SnapshotKind, to: &'a SnapshotFiles) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            match kind {
                SnapshotKind::Changes => Err(Error::NoSnapshot { driver: super::NAME }),
                SnapshotKind::Full => {
                    let (socket, size) = (self.vm.migration_socket(), self.memory_size().await?);
                    snapshot::save(&self.qmp, &socket, size, to).await.map_err(Error::Save)
                }
            }
        })
    }

    fn ended(&self) -> BoxFuture<'_, VmmEnd> {
        Box::pin(async {
            let end = self.process.ended().await;
            // Both sockets end with the process; on a busy machine it takes a while to read what they held.
            let (shutdown, _) = tokio::join!(
                timeout(LAST_WORDS, self.qmp.closed()),
                timeout(LAST_WORDS, self.console.finished()),
            );
            match shutdown.ok().flatten() {
                Some(Shutdown::PoweredOff) => VmmEnd::PoweredOff,
                Some(Shutdown::Reset) => VmmEnd::Reset,
                None => end,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_boots_again_as_often_as_its_agent_wants_it_and_not_for_ever() {
        for (resets, wanted, may) in [(1, 1, true), (1, 0, false), (3, 3, true), (3, 2, false), (5, 5, false)]
        {
            assert_eq!(may_boot_again(resets, wanted), may, "{resets} {wanted}");
        }
    }
}
