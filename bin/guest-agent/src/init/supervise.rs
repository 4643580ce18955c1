//! PID 1 after the start: waits for orphans, restarts an agent that has died, passes on the wish to shut down.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use imp_sys::signals::{self, Number, SignalQueue};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

use super::handover::Requests;
use super::modules::Late;
use super::root::AGENT;
use super::{Error, arguments};
use crate::channel::Endpoint;
use crate::log;
use crate::shutdown::{self, PowerOff};

/// systemd, when it ends the machine, spares processes whose name begins so.
const AGENT_NAME: &str = "@imp-agent";
/// Cgroup of the agent itself, and the one below which those of its processes are.
const AGENT_CGROUP: &str = "/sys/fs/cgroup/imp/agent";
pub(super) const EXEC_CGROUPS: &str = "/sys/fs/cgroup/imp/exec";
/// Buffers of chunks stay in one heap: mapped anew, each page of each costs a fault, and an arena for each thread a heap.
/// The agent gives it back when it is idle.
const MALLOC: &str =
    "glibc.malloc.mmap_threshold=4194304:glibc.malloc.trim_threshold=4194304:glibc.malloc.arena_max=1";
/// An agent that dies sooner than this after its start is given a pause.
const HEALTHY: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);
/// Deaths in a row after which the machine has no use.
const MOST_DEATHS: u32 = 20;

struct Running {
    pid: u32,
    started: Instant,
    requests: Option<Requests>,
}

pub(super) fn supervise(
    channel: &Endpoint,
    scratch: OwnedFd,
    power_off: PowerOff,
    late: Late,
) -> Result<std::convert::Infallible, Error> {
    let wanted = [Number::CHLD, Number::INT, Number::TERM, Number::PWR].map(Number::get);
    let queue = signals::block_all(&wanted).map_err(Error::Agent)?;
    // Ctrl-Alt-Delete becomes SIGINT for this process instead of a reset.
    let _ = reboot(RebootCommand::CadOff);
    let mut agent = start(channel, &scratch, power_off)?;
    super::stage("start of the agent");
    late.load();
    super::stage("late modules");
    let mut deaths = 0;
    loop {
        wait_for_news(&queue, &mut agent);
        while let Ok(Some(signal)) = queue.next() {
            if signal != Number::CHLD.get() {
                let _ = signals::send(agent.pid, Number::TERM);
            }
        }
        if reap(agent.pid) == Agent::Lives {
            continue;
        }
        deaths = if agent.started.elapsed() < HEALTHY { deaths + 1 } else { 1 };
        log::error(format_args!("the agent died ({deaths} in a row); its processes end with it"));
        // Nobody can account for them any more: their streams are broken and their exits unknown.
        let _ = fs::write(format!("{EXEC_CGROUPS}/cgroup.kill"), "1");
        if deaths >= MOST_DEATHS {
            shutdown::finish(Some(&scratch), power_off);
        }
        if deaths > 1 {
            std::thread::sleep(PAUSE);
        }
        agent = start(channel, &scratch, power_off)?;
    }
}

/// Waits for a signal or for a request of the agent, and serves the latter.
fn wait_for_news(queue: &SignalQueue, agent: &mut Running) {
    let mut polled = vec![PollFd::new(queue, PollFlags::IN)];
    if let Some(requests) = &agent.requests {
        polled.push(PollFd::new(requests, PollFlags::IN));
    }
    if poll(&mut polled, None).is_err() {
        return;
    }
    let asked = polled.get(1).is_some_and(|requests| !requests.revents().is_empty());
    if asked && !agent.requests.as_mut().is_some_and(Requests::execute) {
        // The agent's end is closed; that it has died comes as a signal.
        agent.requests = None;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Agent {
    Lives,
    Died,
}

/// Waits for all children that have ended: orphans of the whole machine come here.
fn reap(agent: u32) -> Agent {
    let mut state = Agent::Lives;
    while let Ok(Some(child)) = wait(WaitOptions::NOHANG) {
        if child.0.as_raw_nonzero().get().unsigned_abs() == agent {
            state = Agent::Died;
        }
    }
    state
}

fn start(channel: &Endpoint, scratch: &OwnedFd, power_off: PowerOff) -> Result<Running, Error> {
    let (ours, theirs) = UnixStream::pair().map_err(Error::Agent)?;
    let inherited = |fd: &dyn AsRawFd| fd.as_raw_fd();
    let words =
        arguments::words(channel, EXEC_CGROUPS, Some(inherited(scratch)), inherited(&theirs), power_off);
    let keep = |keep: FdFlags| -> rustix::io::Result<()> {
        fcntl_setfd(scratch, keep)?;
        fcntl_setfd(&theirs, keep)?;
        if let Endpoint::Port { channel, lane } = channel {
            fcntl_setfd(channel, keep)?;
            lane.as_ref().map_or(Ok(()), |lane| fcntl_setfd(lane, keep))?;
        }
        Ok(())
    };
    let mut command = Command::new(AGENT);
    command.arg0(AGENT_NAME).args(words).env_clear().env("GLIBC_TUNABLES", MALLOC);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = keep(FdFlags::empty()).map_err(std::io::Error::from).and_then(|()| command.spawn());
    let _ = keep(FdFlags::CLOEXEC);
    let child = child.map_err(Error::Agent)?;
    // The agent is no part of what an init in the guest manages.
    super::stage("spawn of the agent");
    let _ = fs::create_dir_all(EXEC_CGROUPS);
    let _ = fs::create_dir_all(AGENT_CGROUP);
    let _ = fs::write(format!("{AGENT_CGROUP}/cgroup.procs"), child.id().to_string());
    Ok(Running { pid: child.id(), started: Instant::now(), requests: Some(Requests::new(ours)) })
}
