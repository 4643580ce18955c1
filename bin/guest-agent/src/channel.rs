//! The channel to the host: a virtio-serial port or a vsock port, and one conversation after the other over it.

mod frames;
mod port;
mod vsock;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::connection;
use tokio::io::{AsyncRead, AsyncWrite};

pub(crate) use self::port::Port;
use crate::agent::Agent;
use crate::log;

/// Pause after a channel that failed at once, so that it is not tried in a tight loop.
const PAUSE: Duration = Duration::from_millis(100);

/// What the host connects to.
#[derive(Debug)]
pub(crate) enum Endpoint {
    /// The devices of two virtio-serial ports, non-blocking.
    Port { channel: OwnedFd, lane: Option<OwnedFd> },
    /// A vsock port to listen on.
    Vsock(u32),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the virtio-serial port cannot be waited for")]
    Port(#[source] io::Error),
    #[error(
        "vsock port {port} cannot be listened on; is the kernel's module vmw_vsock_virtio_transport loaded?"
    )]
    Vsock { port: u32, source: io::Error },
}

#[derive(Debug)]
pub(crate) enum Channel {
    Port { port: Arc<Port>, lane: Option<OwnedFd> },
    Vsock(vsock::Listener),
}

impl Channel {
    pub(crate) fn open(endpoint: Endpoint) -> Result<Self, Error> {
        match endpoint {
            Endpoint::Port { channel, lane } => {
                Ok(Self::Port { port: Arc::new(Port::new(channel).map_err(Error::Port)?), lane })
            }
            Endpoint::Vsock(port) => {
                let listener = vsock::Listener::bind(port).map_err(|source| Error::Vsock { port, source })?;
                Ok(Self::Vsock(listener))
            }
        }
    }

    /// Serves hosts until the machine ends.
    pub(crate) async fn serve(self, agent: &Arc<Agent>) -> Result<(), Error> {
        match self {
            // A port has one host at a time, and its device stays open: closing it throws away what the host has sent.
            Self::Port { port, lane } => {
                if let Some(lane) = lane {
                    tokio::spawn(serve_lane(lane, Arc::clone(agent)));
                }
                loop {
                    port.host().await.map_err(Error::Port)?;
                    let stream = port::Stream::new(Arc::clone(&port));
                    // In a task, so that a panic ends the conversation and not the agent.
                    let _ = tokio::spawn(converse(stream, Arc::clone(agent))).await;
                }
            }
            Self::Vsock(listener) => loop {
                match listener.accept().await {
                    Ok(stream) => drop(tokio::spawn(converse(stream, Arc::clone(agent)))),
                    Err(error) => {
                        log::warn(format_args!("a connection of the host was not accepted: {error}"));
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            },
        }
    }
}

async fn serve_lane(lane: OwnedFd, agent: Arc<Agent>) {
    if let Err(error) = agent.serve_lane(lane).await {
        log::warn(format_args!("the lane is lost, archives go over the channel: {error}"));
    }
}

async fn converse<S>(stream: S, agent: Arc<Agent>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // A host that hangs up, or speaks in the middle of a frame after a reconnect, is no event: it greets again.
    let _ = connection::serve_guest(stream, agent.routes(), env!("CARGO_PKG_VERSION")).await;
}
