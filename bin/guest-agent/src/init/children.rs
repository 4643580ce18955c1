//! The processes of this program that the machine cannot do without, and what each of them is given.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};

use super::arguments::{self, Role};
use super::root::AGENT;
use crate::channel::Endpoint;
use crate::log;
use crate::shutdown::{self, PowerOff};

/// Cgroup of these processes, and the one below which those of the agent's processes are.
const AGENT_CGROUP: &str = "/sys/fs/cgroup/imp/agent";
const EXEC_CGROUPS: &str = "/sys/fs/cgroup/imp/exec";
/// Buffers of chunks stay in one heap: mapped anew, each page of each costs a fault, and an arena for each thread a heap.
/// The agent gives it back when it is idle.
const MALLOC: &str =
    "glibc.malloc.mmap_threshold=4194304:glibc.malloc.trim_threshold=4194304:glibc.malloc.arena_max=1";
/// An agent that dies sooner than this after its start is given a pause.
const HEALTHY: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);
/// Deaths in a row after which the machine has no use.
const MOST_DEATHS: u32 = 20;

/// What the machine is worked with.
pub(super) struct Given {
    pub channel: Endpoint,
    pub scratch: Option<OwnedFd>,
    pub power_off: PowerOff,
}

/// systemd, when it ends the machine, spares processes whose name begins so.
fn name(role: Role) -> &'static str {
    match role {
        Role::Agent | Role::AgentBesideInit => "@imp-agent",
        Role::Keeper => "@imp-keeper",
    }
}

impl Given {
    /// Starts a process of this role; its pid.
    pub(super) fn start(&self, role: Role, companion: Option<BorrowedFd<'_>>) -> io::Result<u32> {
        let scratch = self.scratch.as_ref().map(AsFd::as_fd);
        let number = |fd: BorrowedFd<'_>| fd.as_raw_fd();
        let words = arguments::words(
            role,
            &self.channel,
            EXEC_CGROUPS,
            scratch.map(number),
            companion.map(number),
            self.power_off,
        );
        let channel = match &self.channel {
            Endpoint::Port { channel, lane } => [Some(channel.as_fd()), lane.as_ref().map(AsFd::as_fd)],
            Endpoint::Vsock(_) => [None, None],
        };
        let inherited = [scratch, companion].into_iter().chain(channel).flatten();
        let keep = |flags: FdFlags| inherited.clone().try_for_each(|fd| fcntl_setfd(fd, flags));
        let mut command = Command::new(AGENT);
        command.arg0(name(role)).args(words).env_clear().env("GLIBC_TUNABLES", MALLOC);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = keep(FdFlags::empty()).map_err(io::Error::from).and_then(|()| command.spawn());
        let _ = keep(FdFlags::CLOEXEC);
        let pid = child?.id();
        // It is no part of what an init in the guest manages.
        super::stage("spawn of the agent");
        let _ = fs::create_dir_all(EXEC_CGROUPS);
        let _ = fs::create_dir_all(AGENT_CGROUP);
        let _ = fs::write(format!("{AGENT_CGROUP}/cgroup.procs"), pid.to_string());
        Ok(pid)
    }
}

/// Of one agent after the other.
#[derive(Debug, Default)]
pub(super) struct Deaths(u32);

impl Deaths {
    /// Ends what an agent leaves that was started then, and returns when the next one may be.
    pub(super) fn one_more(&mut self, started: Instant, given: &Given) {
        self.0 = if started.elapsed() < HEALTHY { self.0 + 1 } else { 1 };
        log::error(format_args!("the agent died ({} in a row); its processes end with it", self.0));
        // Nobody can account for them any more: their streams are broken and their exits unknown.
        let _ = fs::write(format!("{EXEC_CGROUPS}/cgroup.kill"), "1");
        if self.0 >= MOST_DEATHS {
            shutdown::finish(given.scratch.as_ref(), given.power_off);
        }
        if self.0 > 1 {
            std::thread::sleep(PAUSE);
        }
    }
}
