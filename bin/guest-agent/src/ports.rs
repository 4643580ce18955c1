//! The service that connects a stream of the host to a port in the guest.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use bytes::BytesMut;
use imp_protocol::guest::forward_input::Input;
use imp_protocol::guest::forward_output::Output;
use imp_protocol::guest::ports_server::Ports;
use imp_protocol::guest::{ForwardInput, ForwardOutput, OpenPort, PortOpened};
use rustix::net::sockopt::set_socket_linger;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
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
        let stream = connect(&open).await?;
        let (outputs, answers) = mpsc::channel(2);
        tokio::spawn(carry(stream, inputs, outputs));
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}

type Outputs = mpsc::Sender<Result<ForwardOutput, Status>>;

/// How one direction of a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// All was said.
    Whole,
    /// The host went away, or its client did, in the midst of it.
    HostBroke,
    PortBroke,
}

/// Both directions, which end apart from each other. What the host has not said to its end is not ended in an orderly way
/// in the guest either: half of an upload must not pass for all of it.
async fn carry(mut stream: TcpStream, inputs: Streaming<ForwardInput>, outputs: Outputs) {
    // Closed before its end, also with this whole agent, it is reset.
    let _ = set_socket_linger(&stream, Some(Duration::ZERO));
    let broke = {
        let (reader, writer) = stream.split();
        let mut input = pin!(to_port(inputs, writer));
        let mut output = pin!(to_host(reader, outputs));
        tokio::select! {
            end = &mut input => end == End::HostBroke || (output.await == End::HostBroke && end != End::Whole),
            end = &mut output => match end {
                // What the host still has to say is let through: a half-closed connection is one.
                End::Whole => input.await == End::HostBroke,
                End::HostBroke => true,
                End::PortBroke => false,
            },
        }
    };
    if !broke {
        let _ = set_socket_linger(&stream, None);
    }
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

async fn to_port(mut inputs: Streaming<ForwardInput>, mut writer: WriteHalf<'_>) -> End {
    loop {
        match inputs.message().await {
            Ok(Some(ForwardInput { input: Some(Input::Data(bytes)) })) => {
                if writer.write_all(&bytes).await.is_err() {
                    return End::PortBroke;
                }
            }
            Ok(Some(ForwardInput { input: Some(Input::ShutDownWrite(_)) })) => {
                return if writer.shutdown().await.is_ok() { End::Whole } else { End::PortBroke };
            }
            Ok(Some(ForwardInput { input: Some(Input::Open(_)) | None })) => {}
            Ok(None) | Err(_) => return End::HostBroke,
        }
    }
}

async fn to_host(reader: ReadHalf<'_>, outputs: Outputs) -> End {
    let end = tokio::select! {
        end = from_port(reader, &outputs) => end,
        () = outputs.closed() => return End::HostBroke,
    };
    match end {
        Ok(end) => end,
        Err(error) => {
            let status = Status::aborted(format!("the connection in the guest failed: {error}"));
            let _ = outputs.send(Err(status)).await;
            End::PortBroke
        }
    }
}

async fn from_port(reader: ReadHalf<'_>, outputs: &Outputs) -> io::Result<End> {
    let send = async |output| outputs.send(Ok(ForwardOutput { output: Some(output) })).await.is_ok();
    if !send(Output::Opened(PortOpened {})).await {
        return Ok(End::HostBroke);
    }
    let mut buffer = BytesMut::new();
    loop {
        reader.readable().await?;
        buffer.reserve(READ);
        match reader.try_read_buf(&mut buffer) {
            Ok(0) => return Ok(End::Whole),
            Ok(_) => {
                if !send(Output::Data(buffer.split().freeze())).await {
                    return Ok(End::HostBroke);
                }
            }
            // An idle connection holds no buffer.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => buffer = BytesMut::new(),
            Err(error) => return Err(error),
        }
    }
}
