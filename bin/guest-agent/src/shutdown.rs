//! The orderly end of the machine.
//!
//! ```text
//! stop signals ─► grace ─► SIGKILL to all ─► sync ─► file systems read-only ─► power off
//! ```

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use imp_sys::signals::{self, Number};
use rustix::mount::{MountFlags, mount_remount};
use rustix::system::{RebootCommand, reboot};

use crate::agent::Agent;
use crate::log;

/// How often the end of the last process is looked for.
const LOOK: Duration = Duration::from_millis(10);
/// Time after SIGKILL that processes have to be gone.
const KILLED: Duration = Duration::from_secs(2);

/// What ends the virtual machine. A kernel that cannot power off halts for ever, so it must be known before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerOff {
    /// The firmware's soft off.
    PowerOff,
    /// A reset, which the VMM takes for the end.
    Restart,
}

impl PowerOff {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PowerOff => "poweroff",
            Self::Restart => "restart",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::PowerOff, Self::Restart].into_iter().find(|way| way.name() == name)
    }

    /// Without ACPI there is no soft off.
    pub(crate) fn of_this_machine() -> Self {
        if fs::exists("/sys/firmware/acpi").unwrap_or(false) { Self::PowerOff } else { Self::Restart }
    }
}

/// Ends everything; does not return.
pub(crate) async fn end_machine(agent: &Arc<Agent>, grace: Duration, power_off: PowerOff) {
    log::info(format_args!("shutting down, grace {} ms", grace.as_millis()));
    if !grace.is_zero() {
        let running = agent.processes().running();
        for process in &running {
            process.ask_to_stop();
        }
        let all_ended = async {
            for process in &running {
                process.exited().await;
            }
        };
        let _ = tokio::time::timeout(grace, all_ended).await;
    }
    let scratch = agent.scratch().and_then(|scratch| scratch.try_clone().ok());
    // The reactor may serve the host meanwhile: it sees the connection end when the machine does.
    let _ = tokio::task::spawn_blocking(move || finish(scratch.as_ref(), power_off)).await;
}

/// What has to happen whatever state the guest is in; also PID 1's way out when there is no agent.
pub(crate) fn finish(scratch: Option<&OwnedFd>, power_off: PowerOff) {
    let _ = signals::send_to_all(Number::KILL);
    let killed = Instant::now();
    while killed.elapsed() < KILLED && !quiet() {
        std::thread::sleep(LOOK);
    }
    rustix::fs::sync();
    // Read-only, a file system is clean; the root cannot be unmounted under the agent's feet.
    let read_only = |path: &str| mount_remount(path, MountFlags::RDONLY, c"");
    let _ = read_only("/");
    if let Some(scratch) = scratch {
        let _ = read_only(&format!("/proc/self/fd/{}", scratch.as_raw_fd()));
    }
    rustix::fs::sync();
    let command = match power_off {
        PowerOff::PowerOff => RebootCommand::PowerOff,
        PowerOff::Restart => RebootCommand::Restart,
    };
    let error = reboot(command);
    log::error(format_args!("the machine did not power off: {error:?}"));
    let _ = reboot(RebootCommand::Restart);
}

/// For a machine of which nothing is to be kept, and whose kernel cannot wait for anything.
pub(crate) fn restart_at_once() {
    if let Err(error) = fs::write("/proc/sysrq-trigger", "b") {
        log::warn(format_args!("the machine is restarted less quickly: {error}"));
        let _ = reboot(RebootCommand::Restart);
    }
}

/// Whether no process is left but PID 1, this one, kernel threads (which have no command line) and zombies.
fn quiet() -> bool {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let own = std::process::id();
    !pids
        .filter(|pid| *pid != 1 && *pid != own)
        .any(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()))
}
