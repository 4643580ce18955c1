//! Names and numbers of signals, and their way to processes that the agent has not started.

use std::io;

use imp_sys::signals::{self, Number};
use rustix::io::Errno;
use tonic::Status;

use super::listing;
use super::process::Scope;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no signal; use a name such as SIGTERM or TERM, RTMIN+3, or a number from 1 to 64")]
pub(crate) struct Unknown(String);

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

/// As the kernel numbers them on x86-64 and aarch64.
const NAMES: [(&str, i32); 34] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
];
/// Parses "SIGTERM", "term", "15", "SIGRTMIN+3" or "RTMAX-1".
pub(crate) fn parse(text: &str) -> Result<Number, Unknown> {
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let number = named(name).or_else(|| real_time(name)).or_else(|| name.parse().ok());
    number.and_then(Number::new).ok_or_else(|| Unknown(text.to_owned()))
}

fn named(name: &str) -> Option<i32> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

fn real_time(name: &str) -> Option<i32> {
    let (first, last) = Number::REAL_TIME;
    let offset = |text: &str, sign| {
        if text.is_empty() { Some(0) } else { text.strip_prefix(sign)?.parse::<u16>().ok().map(i32::from) }
    };
    let number = if let Some(rest) = name.strip_prefix("RTMIN") {
        first + offset(rest, '+')?
    } else {
        last - offset(name.strip_prefix("RTMAX")?, '-')?
    };
    (first..=last).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_signals_are_understood() {
        for (text, number) in [
            ("SIGTERM", 15),
            ("kill", 9),
            ("1", 1),
            ("SIGRTMIN+3", 37),
            ("RTMIN", 34),
            ("RTMAX-1", 63),
            ("64", 64),
        ] {
            assert_eq!(parse(text).map(Number::get), Ok(number), "{text}");
        }
    }

    #[test]
    fn what_is_no_signal_is_refused() {
        for text in ["", "0", "65", "-9", "SIGSIG", "RTMIN+31", "RTMAX+1", "RTMIN+x", "RTMIN+99999999999"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
