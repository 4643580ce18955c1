//! The agent inside every VM: PID 1 or beside the image's init, it runs processes, moves files, forwards ports, and makes
//! the guest the machine that its host wants.
//!
//! Two processes of one binary. PID 1 (`init`) assembles the machine, starts the agent, and from then on only reaps
//! orphans, restarts an agent that died, and becomes the image's own init when it is asked to. The agent (`agent`) talks
//! to the host. So nothing a host or a guest sends reaches PID 1, whose end would be the kernel's panic; and exit statuses
//! of what the agent starts cannot be taken by the reaper, because they are not PID 1's children.
//! A panic in one call unwinds that call's task: its stream ends with an error and all others go on.

mod accounts;
mod after_restore;
mod agent;
mod archive;
mod channel;
mod configure;
mod conversations;
mod files;
pub mod init;
mod lane;
pub mod log;
mod machine;
mod ports;
mod processes;
mod readiness;
mod shutdown;
mod vitals;
mod watch;

pub use agent::{Agent, Surroundings, main};
pub use shutdown::PowerOff;

/// Runs work that blocks, away from the reactor.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, tonic::Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| tonic::Status::internal("the agent failed in this call; others go on"))
}
