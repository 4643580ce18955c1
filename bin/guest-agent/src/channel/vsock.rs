//! A vsock port that the host connects to, once for each conversation.
//!
//! The host does not ask again and again whether the guest has come up: the guest tells it, by a connection to the same
//! port of the host that carries nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// Bytes of one write. The kernel makes a packet in several parts of a longer one, and a Firecracker without the repair of its
/// #5475, as 1.12 is, passes the first part of such a packet on twice when whoever reads at the host is slow.
pub(crate) const MOST: usize = 28 << 10;

#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    pub(crate) fn bind(port: u32) -> io::Result<Self> {
        Ok(Self(crate::readiness::readable(imp_sys::vsock::listen(port)?)?))
    }

    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        loop {
            let mut ready = self.0.readable().await?;
            match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                // tokio's type for unix sockets reads, writes and polls any connected stream socket; nothing asks it
                // for an address.
                Ok(socket) => return UnixStream::from_std(StdStream::from(socket)).map(Stream),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A connection of the host.
#[derive(Debug)]
pub(crate) struct Stream(UnixStream);

impl Stream {
    /// Whoever writes to it keeps to [`MOST`].
    pub(crate) fn into_socket(self) -> UnixStream {
        self.0
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

/// No write of several buffers at once: all of them would be one packet.
impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes.get(..MOST).unwrap_or(bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
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
