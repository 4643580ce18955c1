//! PID 1 after the start: waits for orphans, restarts an agent that has died, passes on the wish to shut down.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use imp_sys::signals::{self, Number, SignalQueue};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

use super::arguments::Role;
use super::children::{Deaths, Given};
use super::handover::Requests;
use super::modules::Late;
use super::{Error, keeper};
use crate::log;

struct Running {
    pid: u32,
    started: Instant,
    requests: Option<Requests>,
}

pub(super) fn supervise(given: &Given, late: Late) -> Result<std::convert::Infallible, Error> {
    let wanted = [Number::CHLD, Number::INT, Number::TERM, Number::PWR].map(Number::get);
    let queue = signals::block_all(&wanted).map_err(Error::Agent)?;
    // Ctrl-Alt-Delete becomes SIGINT for this process instead of a reset.
    let _ = reboot(RebootCommand::CadOff);
    let mut agent = start(given)?;
    super::stage("start of the agent");
    late.load();
    super::stage("late modules");
    let mut deaths = Deaths::default();
    loop {
        wait_for_news(&queue, given, &mut agent);
        while let Ok(Some(signal)) = queue.next() {
            if signal != Number::CHLD.get() {
                let _ = signals::send(agent.pid, Number::TERM);
            }
        }
        if reap(agent.pid) == Agent::Lives {
            continue;
        }
        deaths.one_more(agent.started, given);
        agent = start(given)?;
    }
}

/// Waits for a signal or for a request of the agent, and serves the latter.
fn wait_for_news(queue: &SignalQueue, given: &Given, agent: &mut Running) {
    let mut polled = vec![PollFd::new(queue, PollFlags::IN)];
    if let Some(requests) = &agent.requests {
        polled.push(PollFd::new(requests, PollFlags::IN));
    }
    if poll(&mut polled, None).is_err() {
        return;
    }
    let asked = polled.get(1).is_some_and(|requests| !requests.revents().is_empty());
    let pid = agent.pid;
    if asked && !agent.requests.as_mut().is_some_and(|requests| become_init(requests, given, pid)) {
        // The agent's end is closed; that it has died comes as a signal.
        agent.requests = None;
    }
}

/// Does what the agent has asked for; returns only when that failed. False: nothing more comes from the agent.
fn become_init(requests: &mut Requests, given: &Given, agent: u32) -> bool {
    let Some(request) = requests.next() else { return false };
    // What this process does for the agent, another one does for it from then on.
    let keeper = keeper::hold(agent).and_then(|agent| given.start(Role::Keeper, Some(agent.as_fd())));
    if let Err(error) = &keeper {
        log::warn(format_args!("an agent that dies will not be started again: {error}"));
    }
    let told = requests.execute(&request);
    if let Ok(keeper) = keeper {
        let _ = signals::send(keeper, Number::KILL);
    }
    told
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

fn start(given: &Given) -> Result<Running, Error> {
    let (ours, theirs) = UnixStream::pair().map_err(Error::Agent)?;
    let pid = given.start(Role::Agent, Some(theirs.as_fd())).map_err(Error::Agent)?;
    Ok(Running { pid, started: Instant::now(), requests: Some(Requests::new(ours)) })
}
