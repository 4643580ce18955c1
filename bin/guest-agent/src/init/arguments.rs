//! What PID 1 tells the agent process when it starts it.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use imp_sys::inherit;

use crate::channel::Endpoint;
use crate::shutdown::PowerOff;

/// First argument of the agent process.
pub(crate) const SERVE: &str = "serve";

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
    pub(crate) channel: Endpoint,
    pub(crate) cgroups: PathBuf,
    pub(crate) scratch: Option<OwnedFd>,
    pub(crate) supervisor: Option<UnixStream>,
    pub(crate) power_off: PowerOff,
}

/// The words for an agent process; the descriptors must be inherited by it.
pub(crate) fn words(
    channel: &Endpoint,
    cgroups: &str,
    scratch: Option<RawFd>,
    supervisor: RawFd,
    power_off: PowerOff,
) -> Vec<String> {
    let channel = match channel {
        Endpoint::Port { channel, lane: None } => format!("port:{}", channel.as_raw_fd()),
        Endpoint::Port { channel, lane: Some(lane) } => {
            format!("ports:{},{}", channel.as_raw_fd(), lane.as_raw_fd())
        }
        Endpoint::Vsock(port) => format!("vsock:{port}"),
    };
    let mut words = vec![SERVE.to_owned(), channel, cgroups.to_owned(), supervisor.to_string()];
    words.push(power_off.name().to_owned());
    words.extend(scratch.map(|fd| fd.to_string()));
    words
}

pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, Error> {
    let mut next = |name: &str| words.next().ok_or_else(|| Error::Unknown(name.to_owned()));
    let first = next("the first argument")?;
    if first != SERVE {
        return Err(Error::Unknown(first));
    }
    let channel = next("the channel")?;
    let cgroups = PathBuf::from(next("the cgroups")?);
    let supervisor = take(&next("the supervisor")?)?;
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
    Ok(Arguments { channel, cgroups, scratch, supervisor: Some(supervisor.into()), power_off })
}

fn take(number: &str) -> Result<OwnedFd, Error> {
    let fd = number.parse().map_err(|_| Error::Unknown(number.to_owned()))?;
    inherit::take(fd).map_err(|source| Error::Descriptor(number.to_owned(), source))
}
