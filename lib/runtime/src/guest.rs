//! Host side of a guest: finds the agent, sees when it is lost, and asks it what the engine itself needs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use imp_protocol::connection::{self, Connection};
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{
    ConfigureRequest, ConfigureResponse, PingRequest, ShutdownRequest, SignalRequest, WaitRequest,
    signal_request,
};
use imp_protocol::hello;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::{Code, Status};

use crate::spec::{CopiedMount, HostName, VmSpec};
use crate::status::{AgentFacts, NetworkFacts};
use crate::vmm::{self, Machine};
use crate::{network, random};

mod archive;
#[cfg(test)]
mod copy_tests;
#[cfg(test)]
mod greet_tests;
mod lane;
mod main_process;
mod pack;
pub(crate) mod restore;

pub(crate) use archive::copy_in;
pub use lane::Lane;
pub(crate) use lane::Lanes;
pub(crate) use main_process::{Heard, MAIN, Request, follow};

/// First time that an agent gets to answer a greeting; doubled for each further one. A channel that was just opened may
/// stay silent for good, so the first is short.
const FIRST_ANSWER: Duration = Duration::from_millis(250);
const LONGEST_ANSWER: Duration = Duration::from_secs(4);
/// Pause after a channel that failed at once.
const PAUSE: Duration = Duration::from_millis(50);
/// How long the agent may take for a call that does next to nothing. An emulated guest on a busy host needs seconds.
const CALL: Duration = Duration::from_secs(20);
/// What processes that are left get when the machine goes down.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// A guest's connection, held for a client: see [`crate::Runtime::connection`].
#[derive(Debug, Clone)]
pub struct GuestHold {
    connection: Connection,
    _token: TaskTrackerToken,
}

impl GuestHold {
    pub(crate) fn new(connection: Connection, token: TaskTrackerToken) -> Self {
        Self { connection, _token: token }
    }

    pub fn connection(&self) -> Connection {
        self.connection.clone()
    }
}

/// The channel under a connection. Dropping it hangs up, whoever still uses the connection.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl Channel {
    pub(crate) fn hold(stream: UnixStream) -> Result<(Self, UnixStream), vmm::Error> {
        let held = stream.as_fd().try_clone_to_owned().map_err(vmm::Error::Channel)?;
        Ok((Self(held), stream))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Err(error) = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both) {
            tracing::debug!(%error, "the guest had hung up before");
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Machine(#[from] vmm::Error),
    #[error("the guest and the host do not speak the same protocol")]
    Version(#[source] hello::Error),
    #[error("the guest's agent refused {call}: {}", status.message())]
    Refused { call: &'static str, status: Box<Status> },
    #[error("the guest's agent did not answer {call} within {} s", patience.as_secs())]
    Late { call: &'static str, patience: Duration },
    #[error("the guest did not confirm: {what}")]
    NotConfirmed { what: &'static str },
    #[error("{} cannot be copied to {target} of the guest", path.display())]
    Copy {
        path: PathBuf,
        target: String,
        #[source]
        source: Box<Error>,
    },
    #[error(
        "{} cannot be copied to {target} of the guest, where something else is already: {}; choose another GUEST-PATH",
        path.display(),
        status.message()
    )]
    InTheWay { path: PathBuf, target: String, status: Box<Status> },
    #[error("{} cannot be copied into the guest", path.display())]
    Archive {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// The same of one of the mounts that a guest begins with.
    pub(crate) fn of_copy(self, mount: &CopiedMount) -> Self {
        let (path, target) =
            (mount.source.clone(), String::from_utf8_lossy(mount.target.as_slice()).into_owned());
        match self {
            // These kinds say that something else is at the path: of the image, or of a mount before this one.
            Self::Refused { status, .. }
                if matches!(status.code(), Code::AlreadyExists | Code::FailedPrecondition) =>
            {
                Self::InTheWay { path, target, status }
            }
            archive @ Self::Archive { .. } => archive,
            error => Self::Copy { path, target, source: Box::new(error) },
        }
    }

    /// Whether the guest answered that it does not know what was asked for.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if status.code() == Code::NotFound)
    }

    /// Whether the guest's agent is of a version that does not know the call.
    pub(crate) fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if status.code() == Code::Unimplemented)
    }
}

/// Greets the agent until it answers; only another protocol version ends that early. The caller sets the deadline.
pub(crate) async fn greet(machine: &dyn Machine) -> Result<(Connection, AgentFacts, Channel), Error> {
    let mut patience = FIRST_ANSWER;
    loop {
        let channel = machine.connect_channel(patience).await;
        let began = Instant::now();
        if channel.as_ref().is_err_and(vmm::Error::is_silence) {
            patience = (patience * 2).min(LONGEST_ANSWER);
        }
        if let Ok((held, stream)) = channel.and_then(Channel::hold) {
            match timeout(patience, connection::connect(stream, random::number())).await {
                Ok(Ok((connection, peer))) => match first_call(&connection).await {
                    Ok(kernel_release) => {
                        let agent = AgentFacts { version: peer.software, kernel_release };
                        return Ok((connection, agent, held));
                    }
                    Err(error) => tracing::debug!(%error, "an agent greeted and then said nothing"),
                },
                Ok(Err(connection::Error::Greeting(error @ hello::Error::TooOld { .. }))) => {
                    return Err(Error::Version(error));
                }
                Ok(Err(error)) => tracing::trace!(%error, "no answer on the channel yet"),
                Err(_) => patience = (patience * 2).min(LONGEST_ANSWER),
            }
        }
        if began.elapsed() < PAUSE {
            sleep(PAUSE).await;
        }
    }
}

async fn first_call(connection: &Connection) -> Result<String, Error> {
    let answer = call("Ping", MachineClient::new(connection.clone()).ping(PingRequest::default())).await?;
    Ok(answer.kernel_release)
}

/// Makes the guest the machine that was asked for; checks that it says so.
pub(crate) async fn configure(
    connection: &Connection,
    spec: &VmSpec,
    network: &NetworkFacts,
) -> Result<(), Error> {
    let request = ConfigureRequest {
        hostname: HostName::as_str(&spec.hostname).to_owned(),
        unix_time_nanoseconds: unix_nanoseconds(),
        entropy: random::bytes::<64>().to_vec().into(),
        network: network::interface(network),
        hosts: Vec::new(),
        plain_paths: Vec::new(),
    };
    let wants_network = request.network.is_some();
    let answer = call("Configure", MachineClient::new(connection.clone()).configure(request)).await?;
    let ConfigureResponse { clock_set, entropy_credited, hostname_set, network_configured } = answer;
    let confirmations = [
        ("the clock", clock_set),
        ("the entropy", entropy_credited),
        ("the host name", hostname_set),
        ("the network", network_configured || !wants_network),
    ];
    match confirmations.into_iter().find(|(_, confirmed)| !confirmed) {
        Some((what, _)) => Err(Error::NotConfirmed { what }),
        None => Ok(()),
    }
}

/// Sends the main process its stop signal; an empty one is that which it understands.
pub(crate) async fn signal_main(connection: &Connection, signal: &str) -> Result<(), Error> {
    let target = Some(signal_request::Target::Id(MAIN.into()));
    let request = SignalRequest { target, signal: signal.into(), whole_tree: false };
    call("Signal", ProcessesClient::new(connection.clone()).signal(request)).await.map(drop)
}

/// Tells the agent that the exit is known, then asks it to power off.
pub(crate) async fn shut_down(connection: &Connection) -> Result<(), Error> {
    let acknowledge = WaitRequest { id: MAIN.into(), acknowledge: true };
    call("Wait", ProcessesClient::new(connection.clone()).wait(acknowledge)).await?;
    let request = ShutdownRequest { grace_milliseconds: LAST_GRACE.as_millis() as u64 };
    call("Shutdown", MachineClient::new(connection.clone()).shutdown(request)).await.map(drop)
}

async fn call<T>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Error> {
    call_within(CALL, call, answer).await
}

async fn call_within<T>(
    patience: Duration,
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Error> {
    match timeout(patience, answer).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(Error::Refused { call, status: Box::new(status) }),
        Err(_) => Err(Error::Late { call, patience }),
    }
}

fn unix_nanoseconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
