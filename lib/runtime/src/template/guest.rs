//! Runs one command in a guest and hears what it says, within bounds.

use std::time::Duration;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{ExecInput, ProcessLimits, ProcessSpec, exec_input, exec_output, exit_status};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::spec::{Arguments, MainProcess};

/// The end of a command's output that is kept.
const KEPT: usize = 8 << 10;
/// What the guest gets beyond a command's own time to say how it ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// How a command ended, with the end of what it said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Done {
    pub end: End,
    pub output: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Code(u32),
    Signal(u32),
    TimedOut,
    NotStarted(String),
    /// The guest was lost, or does not keep to its time.
    Lost(String),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "ended by signal {signal}"),
            Self::TimedOut => f.write_str("it took too long"),
            Self::NotStarted(why) => write!(f, "it could not be started: {why}"),
            Self::Lost(why) => write!(f, "the guest was lost: {why}"),
        }
    }
}

/// Runs the command as the main process's user, in its directory, with its environment.
pub(super) async fn run(
    connection: &Connection,
    arguments: &Arguments,
    main: &MainProcess,
    at_most: Duration,
) -> Done {
    let spec = ProcessSpec {
        arguments: arguments.iter().map(Bytes::copy_from_slice).collect(),
        environment: main.environment.expose().iter().map(|v| Bytes::copy_from_slice(v)).collect(),
        user: main.user.clone(),
        working_directory: Bytes::copy_from_slice(main.working_directory.as_slice()),
        limits: Some(ProcessLimits {
            timeout_milliseconds: u64::try_from(at_most.as_millis()).unwrap_or(u64::MAX).max(1),
            ..ProcessLimits::default()
        }),
        ..ProcessSpec::default()
    };
    let mut output = Tail::default();
    let end = match timeout(at_most.saturating_add(PATIENCE), exec(connection, spec, &mut output)).await {
        Ok(Ok(end)) => end,
        Ok(Err(status)) => End::Lost(status.message().to_owned()),
        Err(_) => End::TimedOut,
    };
    Done { end, output: String::from_utf8_lossy(&output.0).into_owned() }
}

async fn exec(connection: &Connection, spec: ProcessSpec, output: &mut Tail) -> Result<End, Status> {
    // The input side stays open until the process has ended.
    let (input, inputs) = mpsc::channel(1);
    // Room for it: the queue is empty.
    let _ = input.try_send(ExecInput { input: Some(exec_input::Input::Start(spec)) });
    let inputs = ReceiverStream::new(inputs);
    let mut outputs = ProcessesClient::new(connection.clone()).exec(inputs).await?.into_inner();
    while let Some(message) = outputs.message().await? {
        match message.output {
            Some(exec_output::Output::Stdout(data) | exec_output::Output::Stderr(data)) => output.push(&data),
            Some(exec_output::Output::Exited(status)) => {
                return Ok(match status.how {
                    _ if status.timed_out => End::TimedOut,
                    Some(exit_status::How::Code(code)) => End::Code(code),
                    Some(exit_status::How::Signal(signal)) => End::Signal(signal),
                    Some(exit_status::How::NotStarted(why)) => End::NotStarted(why),
                    None => End::Lost("it does not say how the command ended".to_owned()),
                });
            }
            Some(
                exec_output::Output::Started(_)
                | exec_output::Output::Dropped(_)
                | exec_output::Output::StdinTaken(_),
            )
            | None => {}
        }
    }
    Err(Status::aborted("the command's output ended before it had"))
}

/// The last bytes of what is pushed.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn push(&mut self, data: &[u8]) {
        self.0.extend_from_slice(data);
        let excess = self.0.len().saturating_sub(KEPT);
        self.0.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_flood_is_kept_and_no_more() {
        let mut tail = Tail::default();
        for _ in 0..100 {
            tail.push(&[b'x'; 1000]);
        }
        tail.push(b"end");
        assert_eq!(tail.0.len(), KEPT);
        assert!(tail.0.ends_with(b"xend"));
    }
}
