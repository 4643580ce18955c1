//! HTTP/2 between our processes: over the channel of a guest, after the greeting, and over the socket of the process that
//! owns a machine's VMs.
//!
//! One connection carries many streams. Windows bound what a peer can make this side hold: at most `STREAM_WINDOW` for each
//! stream that nobody reads. However many of those there are, they hold up no other: the connection's own window has room
//! for all streams that there can be.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{HeaderValue, Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tonic::body::Body;

use crate::hello::{self, Peer, Versions};

/// Header that names the VM a guest call is meant for, on the owner's socket.
pub const VM_HEADER: &str = "imp-vm";

/// Bytes a peer may send on one stream before they are read.
const STREAM_WINDOW: u32 = 2 << 20;
/// Bytes a peer may send on all streams before they are read.
const CONNECTION_WINDOW: u32 = STREAMS * STREAM_WINDOW;
/// Largest frame: a chunk of a file or of output (256 KiB) with what gRPC puts around it, so that it is one frame and not
/// one and a rest; short enough that streams take turns.
const FRAME: u32 = (256 << 10) + (1 << 10);
/// Bytes of the longest frame's payload, for those who look at a connection's bytes.
pub const LONGEST_FRAME: usize = FRAME as usize;
const HEADERS: u32 = 16 << 10;
const STREAMS: u32 = 512;
/// A guest that has said nothing for so long is asked whether it is there, below all streams: no window and no number of
/// streams is in the way of that.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long it may take to answer. An emulated guest on a busy host needs seconds.
const ANSWERS: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Greeting(#[from] hello::Error),
    #[error("HTTP/2 could not start")]
    Http(#[source] hyper::Error),
}

/// The client's end of a connection. Clones share it; it is closed when the peer hangs up or the last clone is dropped
/// and the last stream has ended.
#[derive(Clone)]
pub struct Connection {
    sender: client::SendRequest<Body>,
    vm: Option<HeaderValue>,
    closed: watch::Receiver<bool>,
}

/// Greets the guest at the other end of `channel` and starts HTTP/2. `nonce`: see [`hello::greet`]. The connection is closed
/// also when the guest does not answer its heartbeat.
pub async fn connect<S>(mut channel: S, nonce: u64) -> Result<(Connection, Peer), Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let peer = hello::greet(&mut channel, Versions::OURS, nonce).await?;
    Ok((start(channel, Some(HEARTBEAT)).await?, peer))
}

/// Starts HTTP/2 without a greeting, as on the owner's socket.
pub async fn connect_owner<S>(stream: S) -> Result<Connection, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    start(stream, None).await
}

async fn start<S>(stream: S, heartbeat: Option<Duration>) -> Result<Connection, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = client::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_header_list_size(HEADERS)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .keep_alive_interval(heartbeat)
        .keep_alive_timeout(ANSWERS)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(Error::Http)?;
    let (announce, closed) = watch::channel(false);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "connection ended");
        }
        announce.send_replace(true);
    });
    Ok(Connection { sender, vm: None, closed })
}

/// Serves `routes` to one host: answers its greeting, then its requests, until it hangs up.
pub async fn serve_guest<S>(
    mut channel: S,
    routes: tonic::service::Routes,
    software: &str,
) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    hello::answer(&mut channel, Versions::OURS, software).await?;
    serve(channel, routes).await
}

/// Serves `routes` on a stream without a greeting, until the client hangs up.
pub async fn serve<S>(stream: S, routes: tonic::service::Routes) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    server::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_header_list_size(HEADERS)
        .max_concurrent_streams(STREAMS)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
        .await
        .map_err(Error::Http)
}

impl Connection {
    /// The same connection, with every call meant for the VM of this id.
    pub fn for_vm(&self, id: &str) -> Result<Self, http::header::InvalidHeaderValue> {
        Ok(Self { vm: Some(HeaderValue::from_str(id)?), ..self.clone() })
    }

    /// Whether the peer has hung up.
    pub fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Waits until the peer has hung up or the transport has failed.
    pub async fn closed(&self) {
        // An error says that the task which announces the end is gone, and that is the end too.
        let _ = self.closed.clone().wait_for(|closed| *closed).await;
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("vm", &self.vm).field("closed", &self.is_closed()).finish()
    }
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        *request.uri_mut() = absolute(request.uri());
        if let Some(vm) = &self.vm {
            request.headers_mut().insert(VM_HEADER, vm.clone());
        }
        Box::pin(self.sender.send_request(request))
    }
}

/// HTTP/2 wants a scheme and an authority; on a private channel they say nothing.
fn absolute(uri: &Uri) -> Uri {
    let mut parts = uri.clone().into_parts();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(Authority::from_static("imp"));
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("http://imp/"))
}

#[cfg(test)]
mod tests {
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::guest::machine_client::MachineClient;
    use crate::guest::machine_server::{Machine, MachineServer};
    use crate::guest::{
        ConfigureRequest, ConfigureResponse, PingRequest, PingResponse, ShutdownRequest, ShutdownResponse,
        VitalsRequest, VitalsResponse,
    };

    /// Answers a ping with the VM header instead of the agent's version.
    struct Echo;

    #[tonic::async_trait]
    impl Machine for Echo {
        async fn ping(&self, request: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
            let vm = request.metadata().get(VM_HEADER).map(|vm| vm.to_str().unwrap().to_owned());
            let nonce = request.into_inner().nonce;
            Ok(Response::new(PingResponse {
                nonce,
                agent_version: vm.unwrap_or_default(),
                ..Default::default()
            }))
        }
        async fn configure(
            &self,
            _: Request<ConfigureRequest>,
        ) -> Result<Response<ConfigureResponse>, Status> {
            Err(Status::unimplemented("not in this test"))
        }
        async fn vitals(&self, _: Request<VitalsRequest>) -> Result<Response<VitalsResponse>, Status> {
            Err(Status::unimplemented("not in this test"))
        }
        async fn shutdown(&self, _: Request<ShutdownRequest>) -> Result<Response<ShutdownResponse>, Status> {
            Err(Status::unimplemented("not in this test"))
        }
    }

    fn routes() -> tonic::service::Routes {
        tonic::service::Routes::new(MachineServer::new(Echo))
    }

    #[tokio::test]
    async fn a_call_goes_through_a_channel_after_the_greeting() {
        let (host, guest) = tokio::io::duplex(1 << 10);
        let server = tokio::spawn(serve_guest(guest, routes(), "1.2.3"));
        let (connection, peer) = connect(host, 7).await.unwrap();
        assert_eq!(peer.software, "1.2.3");
        let nonce = bytes::Bytes::from_static(b"n");
        let mut machine = MachineClient::new(connection.for_vm("vm7").unwrap());
        let answer = machine.ping(PingRequest { nonce: nonce.clone() }).await.unwrap().into_inner();
        assert_eq!((answer.nonce, answer.agent_version.as_str()), (nonce, "vm7"));
        drop((machine, connection));
        server.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_hang_up_is_seen() {
        let (host, guest) = tokio::io::duplex(1 << 10);
        let server = tokio::spawn(serve_guest(guest, routes(), "1.2.3"));
        let (connection, _) = connect(host, 7).await.unwrap();
        assert!(!connection.is_closed());
        server.abort();
        connection.closed().await;
        assert!(connection.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_says_nothing_any_more_is_lost_and_one_that_is_idle_is_not() {
        let (host, mut near) = tokio::io::duplex(1 << 10);
        let (mut far, guest) = tokio::io::duplex(1 << 10);
        drop(tokio::spawn(serve_guest(guest, routes(), "1.2.3")));
        let (freeze, frozen) = tokio::sync::oneshot::channel::<()>();
        // Holds both ends for good: nobody hangs up.
        let channel = tokio::spawn(async move {
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                _ = frozen => {}
            }
            (near, far)
        });
        let (connection, _) = connect(host, 7).await.unwrap();
        tokio::time::sleep(100 * HEARTBEAT).await;
        assert!(!connection.is_closed());
        freeze.send(()).unwrap();
        connection.closed().await;
        drop(channel.await.unwrap());
    }
}
