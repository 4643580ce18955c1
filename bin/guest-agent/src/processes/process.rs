//! One process that the agent has started: its tree, its output, its end.
//!
//! ```text
//! start ─► runs ─► main process ended ─► output drained ─► journal closed
//!            └─ timeout: tree killed ─┘
//! ```
//! Background children may outlive the main process and hold its output open. The exec ends without them: what is in the
//! pipes when the main process ends is drained, within a short grace, and what they write later is read and thrown away.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use imp_protocol::guest::{ExitStatus, exit_status::How};
use imp_sys::signals::Number;
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};

use super::journal::{Journal, Keep, Reader, Source};
use super::pace::Portion;
use super::pump;
use super::spec::{Launch, Life, ProcessId, Size};
use super::start::{self, Started};
use super::table::Reservation;
use super::tree::Tree;
use crate::{log, readiness};

/// Output of a detached process that is kept.
const KEPT_OUTPUT: u64 = 1 << 20;
/// Output that a process may be ahead of the one stream that reads it.
const UNREAD_OUTPUT: u64 = 256 << 10;
/// Time that the ends of a process's output have to follow its own end.
const DRAIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: ProcessId,
    pub(crate) pid: u32,
    pub(crate) life: Life,
    pub(crate) tree: Tree,
    pub(crate) stop_signal: Option<Number>,
    journal: Arc<Journal>,
    exit: watch::Sender<Option<ExitStatus>>,
    /// Streams of hosts that it has.
    holders: watch::Sender<u32>,
    /// Gone once the process has ended.
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    /// As much waits in it as its hosts' pace lets through.
    stdin: Option<mpsc::UnboundedSender<Input>>,
    terminal: Option<OwnedFd>,
    /// Of the main process; an image's init, which is PID 1, needs none.
    pidfd: Option<OwnedFd>,
}

/// A stream that a process is held by.
#[derive(Debug)]
pub(crate) struct Holder(Arc<Process>);

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.holders.send_modify(|holders| *holders -= 1);
    }
}

#[derive(Debug)]
pub(crate) enum Input {
    Data(Portion),
    End,
}

impl Process {
    /// Takes charge of a process that was started, and returns it with a reader of all its output.
    /// `ended` is called once, when the exit is known.
    pub(crate) fn take_charge<F>(
        reservation: Reservation,
        launch: &Launch,
        started: Started,
        ended: F,
    ) -> std::io::Result<(Arc<Self>, Reader)>
    where
        F: FnOnce(&Arc<Self>) + Send + 'static,
    {
        let (capacity, keep) = match launch.life {
            Life::Detached => (KEPT_OUTPUT, Keep::Newest),
            Life::OfItsStream => (UNREAD_OUTPUT, Keep::Nothing),
        };
        let journal = Journal::new(capacity, keep);
        let reader = journal.read_from(0);
        let (draining, drain) = watch::channel(false);
        let mut drained = Vec::with_capacity(2);
        let Started { child, tree, stdin, stdout, stderr, terminal } = started;
        // From here on the tree must not be lost: an error kills it.
        let guard = KillOnDrop(Some(&tree));
        for (source, fd) in [(Source::Stdout, Some(stdout)), (Source::Stderr, stderr)] {
            let Some(fd) = fd else { continue };
            let (done, is_done) = oneshot::channel();
            drained.push(is_done);
            tokio::spawn(pump::output(pump::reader(fd)?, source, Arc::clone(&journal), drain.clone(), done));
        }
        let stdin = match stdin {
            None => None,
            Some(fd) => {
                let (sender, inputs) = mpsc::unbounded_channel();
                let end = if terminal.is_some() { pump::End::Character } else { pump::End::Close };
                tokio::spawn(pump::input(pump::writer(fd)?, inputs, end));
                Some(sender)
            }
        };
        let signalled = child.pidfd.try_clone()?;
        let pidfd = readiness::readable(child.pidfd)?;
        guard.defuse();
        let process = Arc::new(Self {
            id: reservation.id().clone(),
            pid: child.pid,
            life: launch.life,
            tree,
            stop_signal: launch.stop_signal,
            journal,
            exit: watch::Sender::new(None),
            holders: watch::Sender::new(0),
            connections: Mutex::new(Connections { stdin, terminal, pidfd: Some(signalled) }),
        });
        reservation.fill(Arc::clone(&process));
        let supervised = Arc::clone(&process);
        let timeout = launch.limits.timeout;
        tokio::spawn(async move {
            let status = supervised.wait_for_end(&pidfd, timeout).await;
            drop(pidfd);
            supervised.disconnect();
            supervised.exit.send_replace(Some(status));
            ended(&supervised);
            let in_time = async {
                for done in &mut drained {
                    let _ = done.await;
                }
            };
            if tokio::time::timeout(DRAIN, in_time).await.is_err() {
                draining.send_replace(true);
                for done in drained {
                    // An error says that the pump is gone; a value that was taken above counts as one.
                    if !done.is_terminated() {
                        let _ = done.await;
                    }
                }
            }
            supervised.journal.close();
            supervised.tree.fell().await;
        });
        Ok((process, reader))
    }

    /// The image's init, which has become PID 1: its exit is the machine's.
    pub(crate) fn init(reservation: Reservation, stop_signal: Option<Number>) -> (Arc<Self>, Reader) {
        let journal = Journal::new(UNREAD_OUTPUT, Keep::Nothing);
        let reader = journal.read_from(0);
        let process = Arc::new(Self {
            id: reservation.id().clone(),
            pid: 1,
            life: Life::Detached,
            tree: Tree::Init,
            stop_signal,
            journal,
            exit: watch::Sender::new(None),
            holders: watch::Sender::new(0),
            connections: Mutex::default(),
        });
        reservation.fill(Arc::clone(&process));
        (process, reader)
    }

    pub(crate) fn exit(&self) -> Option<ExitStatus> {
        self.exit.borrow().clone()
    }

    /// Counts a stream for as long as it lives.
    pub(crate) fn hold(self: &Arc<Self>) -> Holder {
        self.holders.send_modify(|holders| *holders += 1);
        Holder(Arc::clone(self))
    }

    /// Whether a stream holds it, or comes to hold it in time.
    pub(crate) async fn is_held_within(&self, time: Duration) -> bool {
        let mut holders = self.holders.subscribe();
        tokio::time::timeout(time, holders.wait_for(|holders| *holders > 0)).await.is_ok()
    }

    /// Waits for the end of the process.
    pub(crate) async fn exited(&self) -> ExitStatus {
        let mut exit = self.exit.subscribe();
        match exit.wait_for(Option::is_some).await.map(|status| status.clone()) {
            Ok(Some(status)) => status,
            // The sender lives in `self`, so neither can be; the type does not know.
            Ok(None) | Err(_) => ExitStatus::default(),
        }
    }

    pub(crate) fn read_from(&self, offset: u64) -> Reader {
        self.journal.read_from(offset)
    }

    /// Output of a process that ended long ago makes room.
    pub(crate) fn forget_output(&self) {
        self.journal.clear();
    }

    /// Input for the process; after its end, or without stdin, it goes nowhere.
    pub(crate) fn feed(&self, input: Input) {
        if let Some(stdin) = &self.connections().stdin {
            let _ = stdin.send(input);
        }
    }

    pub(crate) fn resize(&self, size: Size) {
        if let Some(terminal) = &self.connections().terminal
            && let Err(error) = start::resize(terminal, size)
        {
            log::warn(format_args!("terminal of {} not resized: {error}", self.id.as_str()));
        }
    }

    pub(crate) fn signal(&self, signal: Number, scope: Scope) {
        match scope {
            Scope::Tree if signal == Number::KILL => self.tree.kill(),
            Scope::Tree => self.tree.signal(signal),
            Scope::Process => self.signal_alone(signal),
        }
    }

    /// One that has just ended needs no signal.
    fn signal_alone(&self, signal: Number) {
        match self.tree {
            Tree::Init => drop(imp_sys::signals::send(self.pid, meant_for_init(signal))),
            // Not by its pid, which is another process's once this one has been waited for.
            Tree::Cgroup(_) | Tree::Session(_) => {
                if let Some(pidfd) = &self.connections().pidfd {
                    drop(imp_sys::signals::send_to(pidfd, signal));
                }
            }
        }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disconnect(&self) {
        *self.connections() = Connections::default();
    }

    async fn wait_for_end(&self, pidfd: &AsyncFd<OwnedFd>, timeout: Option<Duration>) -> ExitStatus {
        let ended = wait(pidfd);
        tokio::pin!(ended);
        let mut timed_out = false;
        let status = match timeout {
            None => ended.await,
            Some(timeout) => match tokio::time::timeout(timeout, &mut ended).await {
                Ok(status) => status,
                Err(_) => {
                    timed_out = true;
                    self.tree.kill();
                    ended.await
                }
            },
        };
        let mut exit = exit_status(status);
        exit.timed_out = timed_out;
        exit.out_of_memory =
            !timed_out && exit.how == Some(How::Signal(9)) && self.tree.out_of_memory(self.pid);
        exit
    }
}

/// Who a signal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Process,
    Tree,
}

/// Kills a tree that nobody has taken charge of.
struct KillOnDrop<'a>(Option<&'a Tree>);

impl KillOnDrop<'_> {
    fn defuse(mut self) {
        self.0 = None;
    }
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(tree) = self.0 {
            tree.kill();
        }
    }
}

async fn wait(pidfd: &AsyncFd<OwnedFd>) -> Option<WaitIdStatus> {
    loop {
        let Ok(mut ready) = pidfd.readable().await else { return None };
        match waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => return Some(status),
            Ok(None) => ready.clear_ready(),
            Err(error) => {
                log::warn(format_args!("a process could not be waited for: {error}"));
                return None;
            }
        }
    }
}

fn exit_status(status: Option<WaitIdStatus>) -> ExitStatus {
    let code = status.as_ref().and_then(WaitIdStatus::exit_status);
    let signal = status.as_ref().and_then(WaitIdStatus::terminating_signal);
    let how = match (code, signal) {
        (Some(code), _) => Some(How::Code(code.unsigned_abs() & 0xff)),
        (None, Some(signal)) => Some(How::Signal(signal.unsigned_abs())),
        // Somebody else has waited for it: the host must not take this for a success.
        (None, None) => None,
    };
    ExitStatus { how, ..Default::default() }
}

impl Process {
    /// Asks for an orderly end, each in the way it understands.
    pub(crate) fn ask_to_stop(&self) {
        let default = match self.tree {
            Tree::Cgroup(_) | Tree::Session(_) => Number::TERM,
            Tree::Init => stop_signal_of_init(),
        };
        // The main process passes it on as it sees fit; a tree whose parts are signalled behind its back is not orderly.
        self.signal(self.stop_signal.unwrap_or(default), Scope::Process);
    }
}

/// Images made for containers have systemd halt, by SIGRTMIN+3, which ends a container. A machine that halts stays.
fn meant_for_init(signal: Number) -> Number {
    let after = |first: i32| Number::new(Number::REAL_TIME.0 + first);
    after(4).filter(|_| after(3) == Some(signal)).unwrap_or(signal)
}

/// systemd powers off at SIGRTMIN+4; busybox's and others' init at SIGUSR2.
fn stop_signal_of_init() -> Number {
    let program = std::fs::read_link("/proc/1/exe").unwrap_or_default();
    let systemd = program.file_name().is_some_and(|name| name == "systemd");
    Number::new(Number::REAL_TIME.0 + 4).filter(|_| systemd).unwrap_or(Number::USR2)
}
