//! A vsock port that the host connects to, once for each conversation.

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
