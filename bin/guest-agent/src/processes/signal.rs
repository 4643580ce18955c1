//! Signals on their way to processes that the agent has not started.

use std::io;

use imp_protocol::signal;
use imp_sys::signals::{self, Number};
use rustix::io::Errno;
use tonic::Status;

use super::listing;
use super::process::Scope;

pub(crate) use imp_protocol::signal::Unknown;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no process has pid {0}; List shows all of them")]
    NoProcess(u32),
    #[error("pid {0} is what the machine runs on; Shutdown ends it")]
    OutOfReach(u32),
    #[error("pid {0} takes no signal: {1}")]
    Kernel(u32, #[source] io::Error),
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        match error {
            Error::NoProcess(_) => Self::not_found(error.to_string()),
            Error::OutOfReach(_) => Self::permission_denied(error.to_string()),
            Error::Kernel(..) => Self::internal(error.to_string()),
        }
    }
}

/// Sends a signal to a process that somebody else has started, or to it and its descendants.
pub(crate) fn send_to_other(pid: u32, signal: Number, scope: Scope) -> Result<(), Error> {
    let own = std::process::id();
    if pid == 1 || pid == own {
        return Err(Error::OutOfReach(pid));
    }
    let failed = |error: io::Error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::SRCH) => Error::NoProcess(pid),
        _ if error.kind() == io::ErrorKind::InvalidInput => Error::NoProcess(pid),
        _ => Error::Kernel(pid, error),
    };
    let below = match scope {
        Scope::Process => Vec::new(),
        Scope::Tree => listing::descendants(pid),
    };
    signals::send(pid, signal).map_err(failed)?;
    for member in below.into_iter().filter(|member| ![1, own, pid].contains(member)) {
        // One that has just ended needs no signal.
        let _ = signals::send(member, signal);
    }
    Ok(())
}

/// As users and images write it.
pub(crate) fn parse(text: &str) -> Result<Number, Unknown> {
    signal::number(text).map(|number| Number::new(number).expect("a signal's number is one"))
}
