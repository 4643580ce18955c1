//! Asks the host's name servers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, ResponseCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::question::Question;

/// For one server, by one way.
const PATIENCE: Duration = Duration::from_secs(2);
/// As long as a guest waits before it asks again.
const ALTOGETHER: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(super) enum UpstreamError {
    #[error("this host has no name server: none is named in /etc/resolv.conf")]
    NoServers,
    #[error("no name server answered in time")]
    TimedOut,
    #[error("cannot ask the name server {server}")]
    Ask { server: SocketAddr, source: io::Error },
    #[error("the name server {server} does not know what to answer ({code})")]
    Failed { server: SocketAddr, code: ResponseCode },
}

/// The answer of the first server that has one.
pub(super) async fn ask(servers: &[SocketAddr], question: &Question) -> Result<Message, UpstreamError> {
    timeout(ALTOGETHER, ask_in_turn(servers, question)).await.unwrap_or(Err(UpstreamError::TimedOut))
}

async fn ask_in_turn(servers: &[SocketAddr], question: &Question) -> Result<Message, UpstreamError> {
    let mut last = UpstreamError::NoServers;
    for server in servers {
        match ask_one(*server, question).await {
            Ok(answer) => match answer.metadata.response_code {
                ResponseCode::NoError | ResponseCode::NXDomain => return Ok(answer),
                code => last = UpstreamError::Failed { server: *server, code },
            },
            Err(source) => last = UpstreamError::Ask { server: *server, source },
        }
    }
    Err(last)
}

async fn ask_one(server: SocketAddr, question: &Question) -> io::Result<Message> {
    let asked = question.to_upstream();
    let bytes = asked.to_vec().map_err(io::Error::other)?;
    let answer = timeout(PATIENCE, by_datagram(server, &bytes, &asked)).await??;
    if answer.metadata.truncation {
        timeout(PATIENCE, by_stream(server, &bytes, &asked)).await?
    } else {
        Ok(answer)
    }
}

async fn by_datagram(server: SocketAddr, bytes: &[u8], asked: &Message) -> io::Result<Message> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // A socket of its own for each question: its port is one more thing that a forger does not know.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(bytes).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..length).and_then(|bytes| Message::from_vec(bytes).ok());
        // What is not the answer is a forgery, or late; the answer may still come.
        if let Some(answer) = answer.filter(|answer| answers(answer, asked)) {
            return Ok(answer);
        }
    }
}

async fn by_stream(server: SocketAddr, bytes: &[u8], asked: &Message) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    let mut message = u16::try_from(bytes.len()).map_err(io::Error::other)?.to_be_bytes().to_vec();
    message.extend(bytes);
    stream.write_all(&message).await?;
    let mut buffer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut buffer).await?;
    let answer = Message::from_vec(&buffer).map_err(io::Error::other)?;
    if answers(&answer, asked) { Ok(answer) } else { Err(io::Error::other("an answer to another question")) }
}

fn answers(answer: &Message, asked: &Message) -> bool {
    answer.metadata.message_type == MessageType::Response
        && answer.metadata.id == asked.metadata.id
        && answer.queries == asked.queries
}
