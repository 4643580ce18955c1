//! Beside an image's own init, which is PID 1 and reaps the agent like any orphan: starts an agent that has died again.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use imp_sys::signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};

use super::arguments::{Arguments, Role};
use super::children::{Deaths, Given};

/// Ends only when there can be no agent any more.
pub(crate) fn keep(arguments: Arguments) -> io::Result<()> {
    let Arguments { channel, scratch, companion, power_off, .. } = arguments;
    let given = Given { channel, scratch, power_off };
    // Only what cannot be blocked ends it.
    signals::block_all(&[])?;
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut agent = companion.ok_or(io::ErrorKind::InvalidInput)?;
    let (mut deaths, mut started) = (Deaths::default(), Instant::now());
    loop {
        wait_for_the_end(&agent)?;
        deaths.one_more(started, &given);
        agent = hold(given.start(Role::AgentBesideInit, None)?)?;
        started = Instant::now();
    }
}

/// A handle of a child that nobody has waited for.
pub(super) fn hold(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// The first agent is a child of PID 1, who waits for it; the others are this process's own.
fn wait_for_the_end(agent: &OwnedFd) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(agent, PollFlags::IN)], None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let _ = waitid(WaitId::PidFd(agent.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    Ok(())
}
