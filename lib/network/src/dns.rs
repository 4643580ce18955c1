//! The name server of one VM: passes on questions for names that its policy allows, and opens the addresses in the answer
//! before the guest has the answer.
//!
//! ```text
//! guest ── UDP, TCP ──► decide ──(not allowed)──► refusal
//!                         └──(allowed)──► upstream ──► judge ──► open addresses in the filter ──► answer
//! ```
//!
//! It listens inside the VM's namespace, so which VM asks is certain; it asks from the host's. What a guest can make it do
//! at once is bounded, and every wait has an end.

mod answer;
mod question;
mod resolvers;
mod upstream;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use resolvers::{ResolversError, system_resolvers};

use crate::egress::Egress;
use crate::names::VmName;
use crate::opening::Admission;
use question::{Decision, Question};

const PORT: u16 = 53;

/// No question is longer; what is comes from nobody who wants an answer.
const LONGEST_QUESTION: usize = 1024;
/// Questions that wait for an answer, of one VM. Further ones over UDP are dropped: the guest asks again.
const MOST_QUESTIONS: usize = 64;
const MOST_CONNECTIONS: usize = 16;
/// Between two tries of something that the host refuses.
const REST: Duration = Duration::from_millis(100);
/// How long a connection may say nothing.
const IDLE: Duration = Duration::from_secs(10);

/// Sockets in a VM's namespace, bound to its gateway's addresses.
#[derive(Debug)]
pub struct NameSockets {
    udp: Vec<std::net::UdpSocket>,
    tcp: Vec<std::net::TcpListener>,
}

/// Which addresses a guest can use; names have no others for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Families {
    Ipv4,
    Both,
}

/// Who is asked, in order.
#[derive(Debug, Clone)]
pub enum Resolvers {
    /// Those of the host, as it names them at the time: a host that moves to another network names others.
    OfHost,
    These(Vec<SocketAddr>),
}

/// What a VM's questions are answered by.
pub struct Names {
    pub vm: VmName,
    pub egress: Egress,
    pub families: Families,
    pub resolvers: Resolvers,
    pub admission: Admission,
}

impl NameSockets {
    /// Binds in the calling thread's namespace.
    pub(crate) fn bind(addresses: &[IpAddr]) -> io::Result<Self> {
        let mut sockets = Self { udp: Vec::new(), tcp: Vec::new() };
        for address in addresses {
            let udp = std::net::UdpSocket::bind((*address, PORT))?;
            udp.set_nonblocking(true)?;
            sockets.udp.push(udp);
            let tcp = std::net::TcpListener::bind((*address, PORT))?;
            tcp.set_nonblocking(true)?;
            sockets.tcp.push(tcp);
        }
        Ok(sockets)
    }
}

/// Serves a VM until the future is dropped, which ends all that it does.
pub async fn serve(sockets: NameSockets, names: Names) -> io::Result<()> {
    let names = Arc::new(names);
    let questions = Arc::new(Semaphore::new(MOST_QUESTIONS));
    let mut listeners: JoinSet<io::Result<()>> = JoinSet::new();
    for socket in sockets.udp {
        let socket = Arc::new(UdpSocket::from_std(socket)?);
        listeners.spawn(serve_udp(socket, Arc::clone(&names), Arc::clone(&questions)));
    }
    for listener in sockets.tcp {
        let listener = TcpListener::from_std(listener)?;
        listeners.spawn(serve_tcp(listener, Arc::clone(&names), Arc::clone(&questions)));
    }
    while let Some(ended) = listeners.join_next().await {
        ended.map_err(io::Error::other)??;
    }
    Ok(())
}

async fn serve_udp(socket: Arc<UdpSocket>, names: Arc<Names>, questions: Arc<Semaphore>) -> io::Result<()> {
    let mut answering = JoinSet::new();
    let mut buffer = vec![0; LONGEST_QUESTION + 1];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // An answer that nobody was there for any more; not a fault of this socket.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => {
                rest(&names.vm, &error).await;
                continue;
            }
        };
        while answering.try_join_next().is_some() {}
        let Some(bytes) = buffer.get(..length.min(LONGEST_QUESTION)) else { continue };
        let Ok(permit) = Arc::clone(&questions).try_acquire_owned() else { continue };
        let (socket, names, bytes) = (Arc::clone(&socket), Arc::clone(&names), bytes.to_vec());
        answering.spawn(async move {
            let _permit = permit;
            if let Some(answer) = names.answer(&bytes, question::Carrier::Datagram).await {
                // If it does not get through the guest asks again.
                let _ = socket.send_to(&answer, from).await;
            }
        });
    }
}

async fn serve_tcp(listener: TcpListener, names: Arc<Names>, questions: Arc<Semaphore>) -> io::Result<()> {
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut serving = JoinSet::new();
    loop {
        let permit = Arc::clone(&connections).acquire_owned().await.map_err(io::Error::other)?;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // The connection was gone before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => {
                rest(&names.vm, &error).await;
                continue;
            }
        };
        while serving.try_join_next().is_some() {}
        let (names, questions) = (Arc::clone(&names), Arc::clone(&questions));
        serving.spawn(async move {
            let _permit = permit;
            // However the connection ends, the guest opens another if it has further questions.
            let _ = serve_connection(stream, &names, &questions).await;
        });
    }
}

/// What the host is short of, descriptors or memory, comes back; a name server that gave up would not.
async fn rest(vm: &VmName, error: &io::Error) {
    tracing::warn!(%vm, %error, "the name server of a VM waits for its host");
    tokio::time::sleep(REST).await;
}

async fn serve_connection(
    mut stream: TcpStream,
    names: &Arc<Names>,
    questions: &Semaphore,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        let length = usize::from(timeout(IDLE, stream.read_u16()).await??);
        if length > LONGEST_QUESTION {
            return Ok(());
        }
        let mut bytes = vec![0; length];
        timeout(IDLE, stream.read_exact(&mut bytes)).await??;
        let _permit = questions.acquire().await.map_err(io::Error::other)?;
        let Some(answer) = names.answer(&bytes, question::Carrier::Stream).await else { return Ok(()) };
        let mut message = u16::try_from(answer.len()).map_err(io::Error::other)?.to_be_bytes().to_vec();
        message.extend(answer);
        timeout(IDLE, stream.write_all(&message)).await??;
    }
}

impl Names {
    /// Nothing, if `bytes` are no question.
    async fn answer(self: &Arc<Self>, bytes: &[u8], carrier: question::Carrier) -> Option<Vec<u8>> {
        match question::decide(bytes, carrier, &self.egress, self.families)? {
            Decision::Answer(answer) => Some(answer),
            Decision::Ask(question) => self.ask(question).await,
        }
    }

    async fn ask(self: &Arc<Self>, question: Question) -> Option<Vec<u8>> {
        let resolvers = match &self.resolvers {
            Resolvers::These(resolvers) => resolvers.clone(),
            Resolvers::OfHost => tokio::task::spawn_blocking(system_resolvers)
                .await
                .map_err(io::Error::other)
                .and_then(|found| found.map_err(io::Error::other))
                .inspect_err(|error| tracing::warn!(%error, "this host's name servers are not known"))
                .unwrap_or_default(),
        };
        let found = match upstream::ask(&resolvers, &question).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(vm = %self.vm, name = %question.name(), %error, "a name was not resolved");
                return question.failure();
            }
        };
        let judged = answer::judge(&question, found, &self.egress);
        if !judged.openings.is_empty() {
            let names = Arc::clone(self);
            let openings = judged.openings;
            let opened = tokio::task::spawn_blocking(move || names.admission.open(&openings)).await;
            match opened {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(vm = %self.vm, name = %question.name(), %error, "an allowed name could not be opened");
                    return question.failure();
                }
                Err(_) => return question.failure(),
            }
        }
        question.reply(judged.records, judged.code)
    }
}
