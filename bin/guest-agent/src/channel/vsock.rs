//! A vsock port that the host connects to, once for each conversation.
//!
//! The host does not ask again and again whether the guest has come up: the guest tells it, by a connection to the same
//! port of the host that carries nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    pub(crate) fn bind(port: u32) -> io::Result<Self> {
        Ok(Self(crate::readiness::readable(imp_sys::vsock::listen(port)?)?))
    }

    pub(crate) async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let mut ready = self.0.readable().await?;
            match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                // tokio's type for unix sockets reads, writes and polls any connected stream socket; nothing asks it
                // for an address.
                Ok(socket) => return UnixStream::from_std(StdStream::from(socket)),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Beside everything else: a host that does not wait for it may not even answer.
pub(crate) fn knock(port: u32) -> io::Result<()> {
    std::thread::Builder::new().name("knock".to_owned()).spawn(move || knock_once(port)).map(drop)
}

/// A host that waits has its answer by the attempt alone; one that does not refuses it.
fn knock_once(port: u32) {
    if let Err(error) = imp_sys::vsock::connect_to_host(port) {
        crate::log::debug(format_args!("the host did not wait for this guest: {error}"));
    }
}
