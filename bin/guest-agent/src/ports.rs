//! The service that connects a stream of the host to a port in the guest.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::BytesMut;
use imp_protocol::guest::forward_input::Input;
use imp_protocol::guest::forward_output::Output;
use imp_protocol::guest::ports_server::Ports;
use imp_protocol::guest::{ForwardInput, ForwardOutput, OpenPort, PortOpened};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::Guest;

const CONNECT: Duration = Duration::from_secs(30);
/// Bytes read from the port at once.
const READ: usize = 64 << 10;

#[tonic::async_trait]
impl Ports for Guest {
    type ForwardStream = ReceiverStream<Result<ForwardOutput, Status>>;

    async fn forward(
        &self,
        request: Request<Streaming<ForwardInput>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let mut inputs = request.into_inner();
        let first = tokio::time::timeout(CONNECT, inputs.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no `open` came"))??;
        let Some(Input::Open(open)) = first.and_then(|first| first.input) else {
            return Err(Status::invalid_argument("the first message must be `open`"));
        };
        let (reader, writer) = connect(&open).await?.into_split();
        let (outputs, stream) = mpsc::channel(2);
        // The stream's two directions end apart from each other; a host that hangs up ends both.
        let feed = tokio::spawn(to_port(inputs, writer));
        tokio::spawn(async move {
            let end = tokio::select! {
                end = from_port(reader, &outputs) => end,
                () = outputs.closed() => Err(End::HostGone),
            };
            match end {
                // What the host still has to say is let through: a half-closed connection is one.
                Ok(()) => drop(feed),
                Err(End::HostGone) => feed.abort(),
                Err(End::Port(error)) => {
                    feed.abort();
                    let _ = outputs
                        .send(Err(Status::aborted(format!("the connection in the guest failed: {error}"))))
                        .await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

enum End {
    HostGone,
    Port(io::Error),
}

async fn connect(open: &OpenPort) -> Result<TcpStream, Status> {
    let port = u16::try_from(open.port).ok().filter(|port| *port > 0);
    let port =
        port.ok_or_else(|| Status::invalid_argument(format!("`port` is 1 to 65535, not {}", open.port)))?;
    let addresses = if open.address.is_empty() {
        vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]
    } else {
        let address = open.address.parse();
        vec![address.map_err(|_| {
            Status::invalid_argument(format!("`address` must be an IP address, not {:?}", open.address))
        })?]
    };
    let mut failure = io::Error::from(io::ErrorKind::ConnectionRefused);
    for address in addresses {
        match tokio::time::timeout(CONNECT, TcpStream::connect(SocketAddr::new(address, port))).await {
            Ok(Ok(stream)) => {
                // Small writes are not held back.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            // The first address is the one that is meant; only its refusal leaves the second a say.
            Ok(Err(error)) if failure.kind() == io::ErrorKind::ConnectionRefused => failure = error,
            Ok(Err(_)) => {}
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(Status::unavailable(format!("nothing answers on port {port} in the guest: {failure}")))
}

async fn to_port(mut inputs: Streaming<ForwardInput>, mut writer: OwnedWriteHalf) {
    while let Ok(Some(message)) = inputs.message().await {
        match message.input {
            Some(Input::Data(bytes)) => {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Some(Input::ShutDownWrite(_)) => break,
            Some(Input::Open(_)) | None => {}
        }
    }
    let _ = writer.shutdown().await;
    // A connection that is reset when it is dropped would lose what the host has not read yet: the reader's half holds it.
}

async fn from_port(
    reader: OwnedReadHalf,
    outputs: &mpsc::Sender<Result<ForwardOutput, Status>>,
) -> Result<(), End> {
    let send = async |output| {
        outputs.send(Ok(ForwardOutput { output: Some(output) })).await.map_err(|_| End::HostGone)
    };
    send(Output::Opened(PortOpened {})).await?;
    let mut buffer = BytesMut::new();
    loop {
        reader.readable().await.map_err(End::Port)?;
        buffer.reserve(READ);
        match reader.try_read_buf(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => send(Output::Data(buffer.split().freeze())).await?,
            // An idle connection holds no buffer.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => buffer = BytesMut::new(),
            Err(error) => return Err(End::Port(error)),
        }
    }
}
