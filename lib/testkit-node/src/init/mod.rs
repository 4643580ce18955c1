//! PID 1 of a node: prepares the machine, then reaps, while a child serves the test.

mod machine;
mod modules;
mod program;
mod serve;

use std::process::Command;

use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

/// First argument of the child that serves.
pub(crate) const SERVE: &str = "serve";
/// First argument of the step between the child that serves and a program.
pub(crate) const ENTER: &str = "enter";

pub(crate) use modules::{INDEX, load_asked_for};
pub(crate) use program::enter;
pub(crate) use serve::serve;

/// Never returns; when the node cannot go on, the machine ends, and the console says why.
pub(crate) fn run() -> ! {
    if let Err(error) = machine::prepare().and_then(|()| supervise()) {
        say(&format!("{error:#}"));
    }
    loop {
        // A restart ends this machine faster than a power-off, and the VMM does not restart it.
        let _ = reboot(RebootCommand::Restart);
    }
}

/// Reaps until the child that serves has ended.
fn supervise() -> anyhow::Result<()> {
    let server = Command::new("/proc/self/exe").arg(SERVE).spawn()?;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_pid().unsigned_abs() == server.id() => {
                anyhow::bail!("the node's server ended: {status:?}");
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes to the console, which may be gone: that is no reason to fail.
fn say(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "imp-node: {text}");
}
