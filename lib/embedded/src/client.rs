//! The client of an owner.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::process::{self, Input, Output};
use imp_protocol::runtime as wire;
use imp_protocol::runtime::runtime_client::RuntimeClient;
use imp_runtime::VmId;
use imp_runtime::spec::{Memory, VmSpec};
use imp_runtime::status::{BalloonFacts, State, VmStatus};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::report::{Finding, Usage};
use crate::wire as convert;

mod snapshots;
pub use snapshots::{Build, Building, Claimed, Forked};

/// Inputs that wait for the connection; each is at most one chunk.
const QUEUE: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The owner, or a guest behind it, says no: the message is meant for the user.
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    /// The transport's own words say nothing to a user.
    #[error(
        "the connection to the VM, or to the owner of the VMs, broke; `imp ps` says what is left, then run the command again"
    )]
    Lost(Box<Status>),
    #[error("the owner of the VMs gave an answer that this version does not understand")]
    Answer(#[from] convert::Error),
    #[error("a process sent what this version does not understand")]
    Process(#[source] process::Error),
}

impl Error {
    /// Whether no VM has the name or id that was asked for.
    pub fn is_unknown_vm(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == Code::NotFound)
    }

    /// Whether the owner went away; another one may go on with what it did.
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Process(process::Error::CutShort) => true,
            Self::Refused(_)
            | Self::Answer(_)
            | Self::Process(process::Error::Refused(_) | process::Error::Malformed(_)) => false,
        }
    }
}

/// What a broken transport looks like to a gRPC client: an error of its own beneath, which no answer has, or a code that our
/// servers do not use.
fn is_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some() || matches!(status.code(), Code::Unknown | Code::Cancelled)
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        if is_transport(&status) { Self::Lost(Box::new(status)) } else { Self::Refused(Box::new(status)) }
    }
}

impl From<process::Error> for Error {
    fn from(error: process::Error) -> Self {
        match error {
            process::Error::Refused(status) => Self::from(*status),
            error @ (process::Error::CutShort | process::Error::Malformed(_)) => Self::Process(error),
        }
    }
}

/// Who answers on a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub version: String,
    /// Tells another build of the same version apart.
    pub build: String,
    pub pid: u32,
}

#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    pub follow: Follow,
    /// Lines from the end.
    pub tail: Option<u64>,
    pub since: Option<SystemTime>,
    pub source: LogSource,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Follow {
    #[default]
    No,
    UntilStopped,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogSource {
    #[default]
    Main,
    Console,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStream {
    Stdout,
    Stderr,
    Console,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    pub stream: LogStream,
    pub at: SystemTime,
    pub data: Bytes,
}

/// Entries of a log as they come.
pub struct Logs(Streaming<wire::LogEntry>);

impl Logs {
    pub async fn next(&mut self) -> Result<Option<LogEntry>, Error> {
        Ok(self.0.message().await?.map(|entry| LogEntry {
            stream: match entry.stream() {
                wire::log_entry::Stream::Stdout => LogStream::Stdout,
                wire::log_entry::Stream::Stderr => LogStream::Stderr,
                wire::log_entry::Stream::Console => LogStream::Console,
            },
            at: convert::time(entry.unix_nanoseconds),
            data: entry.data,
        }))
    }
}

/// How a client attaches to a main process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    pub stdin: AttachedStdin,
    /// Output from this position of the whole output on; absent: from now on.
    pub from_offset: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachedStdin {
    None,
    /// Stays open for others when this client hangs up.
    Shared,
    /// Closed when this client hangs up.
    Once,
}

/// The main process of a VM, seen through its owner.
pub struct Attached {
    input: mpsc::Sender<wire::AttachInput>,
    output: Streaming<wire::AttachOutput>,
}

/// The sending half.
#[derive(Clone)]
pub struct AttachedInput(mpsc::Sender<wire::AttachInput>);

impl AttachedInput {
    /// False: nothing more is taken, because the process or the connection has ended.
    pub async fn send(&self, input: Input) -> bool {
        let message = wire::attach_input::Message::Input(input.into());
        self.0.send(wire::AttachInput { message: Some(message) }).await.is_ok()
    }
}

/// What came of an attached process.
#[derive(Debug, Clone)]
pub enum Event {
    Output(Output),
    /// The VM ended without an exit status of the process.
    Failed(Box<VmStatus>),
}

impl Attached {
    pub fn input(&self) -> AttachedInput {
        AttachedInput(self.input.clone())
    }

    /// The next event; a stream that ends before the process did is an error.
    pub async fn next(&mut self) -> Result<Event, Error> {
        let message = self.output.message().await?.ok_or(process::Error::CutShort)?;
        match message.message {
            Some(wire::attach_output::Message::Output(output)) => Ok(Event::Output(output.try_into()?)),
            Some(wire::attach_output::Message::Failed(status)) => {
                Ok(Event::Failed(Box::new(convert::status_from_wire(Some(status))?)))
            }
            None => Err(convert::Error::Field("output").into()),
        }
    }
}

/// The owner at the other end of a connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Owner {
    connection: Connection,
    client: RuntimeClient<Connection>,
}

/// What becomes of a VM that is to be removed and still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Running {
    Refuse,
    EndFirst,
}

impl Owner {
    pub fn new(connection: Connection) -> Self {
        Self { client: RuntimeClient::new(connection.clone()), connection }
    }

    /// The agent inside a VM, through the owner.
    pub fn guest(&self, id: &VmId) -> Connection {
        self.connection.for_vm(id.as_str()).expect("an id is hex digits")
    }

    pub async fn identify(&self) -> Result<Identity, Error> {
        let answer = self.client.clone().version(wire::VersionRequest {}).await?.into_inner();
        Ok(Identity { version: answer.version, build: answer.build, pid: answer.pid })
    }

    /// Asks the owner to leave its VMs to another one, and waits until it has.
    pub async fn hand_over(&self) -> Result<(), Error> {
        self.client.clone().hand_over(wire::HandOverRequest {}).await?;
        self.connection.closed().await;
        Ok(())
    }

    pub async fn create(&self, spec: &VmSpec) -> Result<VmStatus, Error> {
        let request = wire::CreateRequest { spec: Some(convert::spec_to_wire(spec)) };
        Ok(convert::status_from_wire(self.client.clone().create(request).await?.into_inner().vm)?)
    }

    /// Boots a created VM; answers at once.
    pub async fn start(&self, vm: &str) -> Result<(), Error> {
        self.client.clone().start(wire::StartRequest { vm: vm.to_owned() }).await?;
        Ok(())
    }

    pub async fn attach(&self, vm: &str, attachment: Attachment) -> Result<Attached, Error> {
        let open = wire::OpenAttach {
            vm: vm.to_owned(),
            stdin: attachment.stdin != AttachedStdin::None,
            stdin_once: attachment.stdin == AttachedStdin::Once,
            from_offset: attachment.from_offset,
        };
        let (input, inputs) = mpsc::channel(QUEUE);
        let open = wire::AttachInput { message: Some(wire::attach_input::Message::Open(open)) };
        input.try_send(open).expect("a new queue has room");
        let output = self.client.clone().attach(ReceiverStream::new(inputs)).await?.into_inner();
        Ok(Attached { input, output })
    }

    /// All VMs, stopped ones too, oldest first.
    pub async fn list(&self) -> Result<Vec<VmStatus>, Error> {
        let answer = self.client.clone().list(wire::ListRequest {}).await?.into_inner();
        Ok(answer.vms.into_iter().map(|vm| convert::status_from_wire(Some(vm))).collect::<Result<_, _>>()?)
    }

    pub async fn inspect(&self, vm: &str) -> Result<VmStatus, Error> {
        let request = wire::InspectRequest { vm: vm.to_owned() };
        Ok(convert::status_from_wire(self.client.clone().inspect(request).await?.into_inner().vm)?)
    }

    /// Waits until the VM has reached `state`, or has stopped.
    pub async fn wait(&self, vm: &str, state: State) -> Result<VmStatus, Error> {
        let state = convert::state_to_wire(state).into();
        let request = wire::WaitRequest { vm: vm.to_owned(), state };
        Ok(convert::status_from_wire(self.client.clone().wait(request).await?.into_inner().vm)?)
    }

    /// `grace`: absent, the VM's own.
    pub async fn stop(&self, vm: &str, grace: Option<Duration>) -> Result<VmStatus, Error> {
        let grace_milliseconds = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let request = wire::StopRequest { vm: vm.to_owned(), grace_milliseconds };
        Ok(convert::status_from_wire(self.client.clone().stop(request).await?.into_inner().vm)?)
    }

    pub async fn kill(&self, vm: &str, signal: &str) -> Result<(), Error> {
        let request = wire::KillRequest { vm: vm.to_owned(), signal: signal.to_owned() };
        self.client.clone().kill(request).await?;
        Ok(())
    }

    /// The id of the VM that is gone.
    pub async fn remove(&self, vm: &str, running: Running) -> Result<String, Error> {
        let request = wire::RemoveRequest { vm: vm.to_owned(), force: running == Running::EndFirst };
        Ok(self.client.clone().remove(request).await?.into_inner().id)
    }

    pub async fn logs(&self, vm: &str, query: LogQuery) -> Result<Logs, Error> {
        let request = wire::LogsRequest {
            vm: vm.to_owned(),
            follow: query.follow == Follow::UntilStopped,
            tail: query.tail,
            since_unix_nanoseconds: query.since.map_or(0, convert::nanoseconds),
            console: query.source == LogSource::Console,
        };
        Ok(Logs(self.client.clone().logs(request).await?.into_inner()))
    }

    /// Of all VMs that run when none is named.
    pub async fn usage(&self, vms: Vec<String>) -> Result<Vec<Usage>, Error> {
        let answer = self.client.clone().usage(wire::UsageRequest { vms }).await?.into_inner();
        Ok(answer.usages.into_iter().map(Into::into).collect())
    }

    /// Leaves the guest of a running VM so much of its memory, as far as it can do without the rest.
    pub async fn set_memory(&self, vm: &str, left: Memory) -> Result<BalloonFacts, Error> {
        let request = wire::SetMemoryRequest { vm: vm.to_owned(), memory_bytes: left.bytes() };
        let answer = self.client.clone().set_memory(request).await?.into_inner();
        Ok(BalloonFacts { wanted_bytes: answer.wanted_bytes, given_bytes: answer.given_bytes })
    }

    pub async fn doctor(&self) -> Result<Vec<Finding>, Error> {
        let answer = self.client.clone().doctor(wire::DoctorRequest {}).await?.into_inner();
        Ok(answer.checks.into_iter().map(Into::into).collect())
    }
}
