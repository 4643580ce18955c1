//! The main process of a VM: started or found again, its output recorded, its end told.

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{
    AttachProcess, ExecInput, ExitStatus, ProcessLimits, ProcessSpec, Terminal, exec_input, exec_output,
    exit_status,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::Error;
use crate::logs::{LogStream, LogWriter};
use crate::spec::{MainProcess, Stdin};
use crate::status::{LostOutput, Outcome};

/// Its id in the guest.
pub(crate) const MAIN: &str = "main";

/// How the process is reached.
pub(crate) enum Request {
    Start {
        spec: Box<ProcessSpec>,
    },
    /// It runs, or has ended, and its output is recorded up to the writer's position.
    Attach,
}

impl Request {
    pub(crate) fn start(main: &MainProcess, processes: Option<u32>) -> Self {
        let terminal = main.terminal.as_ref().map(|terminal| Terminal {
            rows: terminal.rows.into(),
            columns: terminal.columns.into(),
            term: terminal.term.clone(),
        });
        let spec = ProcessSpec {
            id: MAIN.into(),
            arguments: main.arguments.iter().map(Bytes::copy_from_slice).collect(),
            environment: main.environment.expose().iter().map(|v| Bytes::copy_from_slice(v)).collect(),
            user: main.user.clone(),
            working_directory: Bytes::copy_from_slice(main.working_directory.as_slice()),
            terminal,
            stdin: main.stdin == Stdin::Attached,
            // It outlives this stream: the next owner attaches to it.
            detach: true,
            limits: Some(ProcessLimits {
                processes: processes.unwrap_or(0),
                open_files: main.open_files.unwrap_or(0),
                ..ProcessLimits::default()
            }),
            stop_signal: main.stop_signal.clone(),
            as_main: false,
            paced: false,
        };
        Self::Start { spec: Box::new(spec) }
    }
}

/// What is heard of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Heard {
    Started,
    /// So much of its output could not be recorded.
    Lost(LostOutput),
}

/// Follows the process until it has ended, recording its output; returns how. An end of the stream before that is an error.
pub(crate) async fn follow(
    connection: &Connection,
    request: Request,
    log: &mut LogWriter,
    mut heard: impl FnMut(Heard),
) -> Result<Outcome, Error> {
    let refused = |status| Error::Refused { call: "Exec", status: Box::new(status) };
    let first = match request {
        Request::Start { spec } => exec_input::Input::Start(*spec),
        Request::Attach => exec_input::Input::Attach(AttachProcess {
            id: MAIN.into(),
            stdin: false,
            from_offset: log.offset(),
            paced: false,
        }),
    };
    // The input side stays open as long as this is followed, and no longer: a stream that never ended would keep the
    // connection, and with it the channel, from the next owner.
    let (input, inputs) = mpsc::channel(1);
    // Room for it: the queue is empty.
    let _ = input.try_send(ExecInput { input: Some(first) });
    let exec = ProcessesClient::new(connection.clone()).exec(ReceiverStream::new(inputs)).await;
    let mut outputs = exec.map_err(refused)?.into_inner();
    while let Some(output) = outputs.message().await.map_err(refused)? {
        match output.output {
            Some(exec_output::Output::Started(_)) => heard(Heard::Started),
            // A full disk must not stop the process: what cannot be recorded is lost.
            Some(exec_output::Output::Stdout(data)) => log.append(LogStream::Stdout, &data),
            Some(exec_output::Output::Stderr(data)) => log.append(LogStream::Stderr, &data),
            Some(exec_output::Output::Dropped(bytes)) => log.skip(bytes),
            Some(exec_output::Output::Exited(status)) => return Ok(outcome(status)),
            Some(exec_output::Output::StdinTaken(_)) | None => {}
        }
        if let Some(lost) = log.news_of_losses() {
            heard(Heard::Lost(lost));
        }
    }
    Err(Error::NotConfirmed { what: "the end of the main process" })
}

fn outcome(status: ExitStatus) -> Outcome {
    let small = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
    match status.how {
        Some(exit_status::How::Code(code)) => Outcome::Exited { code: small(code) },
        Some(exit_status::How::Signal(signal)) => Outcome::Signalled {
            signal: small(signal),
            out_of_memory: status.out_of_memory,
            timed_out: status.timed_out,
        },
        Some(exit_status::How::NotStarted(why)) => {
            Outcome::NotStarted { why, code: small(status.start_code.max(126)) }
        }
        None => Outcome::NotStarted { why: "the guest did not say how it ended".into(), code: 125 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_of_a_process_has_an_exit_code() {
        let status = |how| ExitStatus { how, ..ExitStatus::default() };
        let table = [
            (Some(exit_status::How::Code(3)), 3),
            (Some(exit_status::How::Code(999)), 255),
            (Some(exit_status::How::Signal(15)), 143),
            (Some(exit_status::How::Signal(250)), 255),
            (Some(exit_status::How::NotStarted("x".into())), 126),
            (None, 125),
        ];
        for (how, code) in table {
            assert_eq!(outcome(status(how.clone())).exit_code(), code, "{how:?}");
        }
    }
}
