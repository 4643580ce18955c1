//! The channel to the host: a virtio-serial port or a vsock port, and one conversation after the other over it.

mod frames;
mod port;
mod vsock;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::{connection, lane};
use tokio::io::{AsyncRead, AsyncWrite, BufReader};

pub(crate) use self::port::Port;
pub(crate) use self::vsock::MOST as MOST_OVER_VSOCK;
use crate::agent::Agent;
use crate::log;

/// Pause after a channel that failed at once, so that it is not tried in a tight loop.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that are read ahead while a greeting is read byte by byte; longer reads go past them.
const GREETING: usize = 256;

/// What the host connects to.
#[derive(Debug)]
pub(crate) enum Endpoint {
    /// The devices of two virtio-serial ports, non-blocking.
    Port { channel: OwnedFd, lane: Option<OwnedFd> },
    /// A vsock port to listen on; the lane's is the next one.
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
    Vsock { channel: vsock::Listener, lane: Option<vsock::Listener> },
}

impl Channel {
    pub(crate) fn open(endpoint: Endpoint) -> Result<Self, Error> {
        match endpoint {
            Endpoint::Port { channel, lane } => {
                Ok(Self::Port { port: Arc::new(Port::new(channel).map_err(Error::Port)?), lane })
            }
            Endpoint::Vsock(port) => {
                let channel = vsock::Listener::bind(port).map_err(|source| Error::Vsock { port, source })?;
                // Before the knock: a host that has heard it may use both.
                let lane =
                    vsock::Listener::bind(lane::vsock_port(port)).map_err(|error| no_lane(&error)).ok();
                vsock::knock(port).map_err(|source| Error::Vsock { port, source })?;
                Ok(Self::Vsock { channel, lane })
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
                    converse(stream, Arc::clone(agent)).await;
                }
            }
            Self::Vsock { channel, lane } => {
                if let Some(lane) = lane {
                    let agent = Arc::clone(agent);
                    tokio::spawn(serve_all(lane, move |stream| {
                        serve_lane_stream(stream, Arc::clone(&agent))
                    }));
                }
                serve_all(channel, |stream| {
                    converse(BufReader::with_capacity(GREETING, stream), Arc::clone(agent))
                })
                .await;
                Ok(())
            }
        }
    }
}

/// Serves each connection in a task of its own, for ever.
async fn serve_all<S>(listener: vsock::Listener, serve: impl Fn(vsock::Stream) -> S)
where
    S: Future<Output = ()> + Send + 'static,
{
    loop {
        match listener.accept().await {
            Ok(stream) => drop(tokio::spawn(serve(stream))),
            Err(error) => {
                log::warn(format_args!("a connection of the host was not accepted: {error}"));
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn serve_lane(lane: OwnedFd, agent: Arc<Agent>) {
    if let Err(error) = agent.serve_lane(lane).await {
        no_lane(&error);
    }
}

async fn serve_lane_stream(stream: vsock::Stream, agent: Arc<Agent>) {
    // A host that is gone sees it in its call.
    if let Err(error) = agent.serve_lane_stream(stream.into_socket()).await {
        log::debug(format_args!("a lane broke: {error}"));
    }
}

fn no_lane(error: &io::Error) {
    log::warn(format_args!("the lane is lost, archives go over the channel: {error}"));
}

async fn converse<S>(stream: S, agent: Arc<Agent>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let conversation = agent.conversations().begin();
    let routes = agent.routes_of(conversation);
    let conversations = Arc::clone(agent.conversations());
    conversations
        .hold(conversation, async move {
            // A host that hangs up, or speaks in the middle of a frame after a reconnect, is no event: it greets again.
            let _ = connection::serve_guest(stream, routes, env!("CARGO_PKG_VERSION")).await;
        })
        .await;
}
