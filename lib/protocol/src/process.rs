//! A process in a guest, as plain types: what is to run, its input, its output, its end.

use std::num::NonZeroU32;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};

use crate::connection::Connection;
use crate::guest;
use crate::guest::processes_client::ProcessesClient;
use crate::guest::{ExecInput, ExecOutput, exec_input, exec_output, exit_status};

/// Messages that wait for the connection; each holds at most one chunk of input.
const QUEUE: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The message is meant for the user; the rest of the status says nothing to one.
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    #[error("the stream ended before the process did")]
    CutShort,
    #[error("an answer lacks the field `{0}`, or holds what no peer of this version sends")]
    Malformed(&'static str),
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// A terminal's size and kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Size {
    pub rows: u16,
    pub columns: u16,
    /// Value of TERM; empty: the agent's default.
    pub term: String,
}

impl From<Size> for guest::Terminal {
    fn from(size: Size) -> Self {
        Self { rows: size.rows.into(), columns: size.columns.into(), term: size.term }
    }
}

/// What a client sends to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    Stdin(Bytes),
    CloseStdin,
    Resize(Size),
    /// To the process's whole tree: "SIGINT".
    Signal(String),
}

impl From<Input> for ExecInput {
    fn from(input: Input) -> Self {
        let input = match input {
            Input::Stdin(data) => exec_input::Input::Stdin(data),
            Input::CloseStdin => exec_input::Input::CloseStdin(guest::CloseStdin {}),
            Input::Resize(size) => exec_input::Input::Resize(size.into()),
            Input::Signal(signal) => exec_input::Input::Signal(signal),
        };
        Self { input: Some(input) }
    }
}

/// What a process sends to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Started {
        /// Bytes of input that may be on their way; absent: as many as the stream takes.
        stdin_window: Option<NonZeroU32>,
    },
    Stdout(Bytes),
    Stderr(Bytes),
    /// Bytes that were not kept for this reader.
    Dropped(u64),
    /// Bytes of all input sent so far that are no longer on their way.
    StdinTaken(u64),
    Exited(Exit),
}

impl TryFrom<ExecOutput> for Output {
    type Error = Error;

    fn try_from(output: ExecOutput) -> Result<Self, Error> {
        match output.output.ok_or(Error::Malformed("output"))? {
            exec_output::Output::Started(started) => {
                Ok(Self::Started { stdin_window: NonZeroU32::new(started.stdin_window) })
            }
            exec_output::Output::Stdout(data) => Ok(Self::Stdout(data)),
            exec_output::Output::Stderr(data) => Ok(Self::Stderr(data)),
            exec_output::Output::Dropped(bytes) => Ok(Self::Dropped(bytes)),
            exec_output::Output::StdinTaken(bytes) => Ok(Self::StdinTaken(bytes)),
            exec_output::Output::Exited(exit) => Ok(Self::Exited(exit.try_into()?)),
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    Code(u8),
    Signal {
        signal: u8,
        out_of_memory: bool,
        timed_out: bool,
    },
    /// Never ran; `code` is what a shell would say: 126 or 127.
    NotStarted {
        reason: String,
        code: u8,
    },
}

impl Exit {
    /// The exit status that a shell would report.
    pub fn code(&self) -> u8 {
        match self {
            Self::Code(code) | Self::NotStarted { code, .. } => *code,
            Self::Signal { signal, .. } => signal.saturating_add(128),
        }
    }
}

impl From<Exit> for guest::ExitStatus {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Code(code) => Self { how: Some(exit_status::How::Code(code.into())), ..Default::default() },
            Exit::Signal { signal, out_of_memory, timed_out } => Self {
                how: Some(exit_status::How::Signal(signal.into())),
                out_of_memory,
                timed_out,
                ..Default::default()
            },
            Exit::NotStarted { reason, code } => Self {
                how: Some(exit_status::How::NotStarted(reason)),
                start_code: code.into(),
                ..Default::default()
            },
        }
    }
}

impl TryFrom<guest::ExitStatus> for Exit {
    type Error = Error;

    fn try_from(status: guest::ExitStatus) -> Result<Self, Error> {
        let byte = |number: u32| u8::try_from(number).map_err(|_| Error::Malformed("exit"));
        match status.how.ok_or(Error::Malformed("exit"))? {
            exit_status::How::Code(code) => Ok(Self::Code(byte(code)?)),
            exit_status::How::Signal(signal) => Ok(Self::Signal {
                signal: byte(signal)?,
                out_of_memory: status.out_of_memory,
                timed_out: status.timed_out,
            }),
            exit_status::How::NotStarted(reason) => {
                let code = byte(status.start_code)?;
                Ok(Self::NotStarted { reason, code: if code == 0 { 126 } else { code } })
            }
        }
    }
}

/// One client's view of one process in a guest: input goes in, output comes out until the exit.
pub struct Session {
    input: mpsc::Sender<ExecInput>,
    output: Streaming<ExecOutput>,
}

impl Session {
    /// Starts a process in the guest at the other end of `connection`, or attaches to one: `first` is `start` or
    /// `attach`.
    pub async fn open(connection: Connection, first: exec_input::Input) -> Result<Self, Error> {
        let (input, inputs) = mpsc::channel(QUEUE);
        input.try_send(ExecInput { input: Some(first) }).expect("a new queue has room");
        let stream = Request::new(ReceiverStream::new(inputs));
        let output = ProcessesClient::new(connection).exec(stream).await?.into_inner();
        Ok(Self { input, output })
    }

    /// Where the input goes; the process's stdin stays open when this is dropped.
    pub fn input(&self) -> mpsc::Sender<ExecInput> {
        self.input.clone()
    }

    /// The next output. A stream that ends without an exit is an error, never a success.
    pub async fn next(&mut self) -> Result<Output, Error> {
        self.output.message().await?.ok_or(Error::CutShort)?.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_crosses_the_wire_unchanged() {
        for exit in [
            Exit::Code(255),
            Exit::Signal { signal: 9, out_of_memory: true, timed_out: false },
            Exit::NotStarted { reason: "no such file".into(), code: 127 },
        ] {
            assert_eq!(Exit::try_from(guest::ExitStatus::from(exit.clone())).unwrap(), exit);
        }
    }

    #[test]
    fn an_exit_status_without_a_meaning_is_refused() {
        assert!(Exit::try_from(guest::ExitStatus::default()).is_err());
        let status = guest::ExitStatus { how: Some(exit_status::How::Code(256)), ..Default::default() };
        assert!(Exit::try_from(status).is_err());
    }

    #[test]
    fn a_signal_is_reported_as_shells_do() {
        assert_eq!(Exit::Signal { signal: 15, out_of_memory: false, timed_out: false }.code(), 143);
        let no_code = guest::ExitStatus {
            how: Some(exit_status::How::NotStarted("denied".into())),
            ..Default::default()
        };
        assert_eq!(Exit::try_from(no_code).unwrap().code(), 126);
    }
}
