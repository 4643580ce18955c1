//! What PID 1 tells the processes that it starts, and its successor those that it starts in its place.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use imp_sys::inherit;

use crate::channel::Endpoint;
use crate::shutdown::PowerOff;

/// What a process of this program is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The agent. Its companion is a socket to PID 1.
    Agent,
    /// The agent beside an image's init, which is PID 1 and the main process. It has no companion.
    AgentBesideInit,
    /// Restarts the agent beside an image's init. Its companion is a handle of the one that runs.
    Keeper,
}

impl Role {
    const ALL: [Self; 3] = [Self::Agent, Self::AgentBesideInit, Self::Keeper];

    /// First argument of the process.
    fn word(self) -> &'static str {
        match self {
            Self::Agent => "serve",
            Self::AgentBesideInit => "serve-beside-init",
            Self::Keeper => "keep",
        }
    }
}

/// In place of a descriptor that is not there.
const NONE: &str = "-";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "this program is PID 1 of a VM and its agent; it is started by the kernel, not by hand (at {0:?})"
    )]
    Unknown(String),
    #[error("inherited descriptor {0} is not open")]
    Descriptor(String, #[source] std::io::Error),
}

#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) role: Role,
    pub(crate) channel: Endpoint,
    pub(crate) cgroups: PathBuf,
    pub(crate) scratch: Option<OwnedFd>,
    pub(crate) companion: Option<OwnedFd>,
    pub(crate) power_off: PowerOff,
}

/// The words for a process; the descriptors must be inherited by it.
pub(crate) fn words(
    role: Role,
    channel: &Endpoint,
    cgroups: &str,
    scratch: Option<RawFd>,
    companion: Option<RawFd>,
    power_off: PowerOff,
) -> Vec<String> {
    let channel = match channel {
        Endpoint::Port { channel, lane: None } => format!("port:{}", channel.as_raw_fd()),
        Endpoint::Port { channel, lane: Some(lane) } => {
            format!("ports:{},{}", channel.as_raw_fd(), lane.as_raw_fd())
        }
        Endpoint::Vsock(port) => format!("vsock:{port}"),
    };
    let companion = companion.map_or(NONE.to_owned(), |fd| fd.to_string());
    let mut words = vec![role.word().to_owned(), channel, cgroups.to_owned(), companion];
    words.push(power_off.name().to_owned());
    words.extend(scratch.map(|fd| fd.to_string()));
    words
}

pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, Error> {
    let mut next = |name: &str| words.next().ok_or_else(|| Error::Unknown(name.to_owned()));
    let first = next("the first argument")?;
    let Some(role) = Role::ALL.into_iter().find(|role| role.word() == first) else {
        return Err(Error::Unknown(first));
    };
    let channel = next("the channel")?;
    let cgroups = PathBuf::from(next("the cgroups")?);
    let companion = Some(next("the companion")?).filter(|word| word != NONE);
    let companion = companion.map(|fd| take(&fd)).transpose()?;
    let power_off = next("the way to power off")?;
    let power_off = PowerOff::parse(&power_off).ok_or(Error::Unknown(power_off))?;
    let scratch = words.next().map(|fd| take(&fd)).transpose()?;
    let channel = match channel.split_once(':') {
        Some(("port", fd)) => Endpoint::Port { channel: take(fd)?, lane: None },
        Some(("ports", fds)) => match fds.split_once(',') {
            Some((port, lane)) => Endpoint::Port { channel: take(port)?, lane: Some(take(lane)?) },
            None => return Err(Error::Unknown(channel)),
        },
        Some(("vsock", port)) => Endpoint::Vsock(port.parse().map_err(|_| Error::Unknown(channel.clone()))?),
        _ => return Err(Error::Unknown(channel)),
    };
    Ok(Arguments { role, channel, cgroups, scratch, companion, power_off })
}

fn take(number: &str) -> Result<OwnedFd, Error> {
    let fd = number.parse().map_err(|_| Error::Unknown(number.to_owned()))?;
    inherit::take(fd).map_err(|source| Error::Descriptor(number.to_owned(), source))
}
