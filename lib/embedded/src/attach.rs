//! Attaches a client to the main process of a VM, from before its start until its end is known.
//!
//! ```text
//! wait for the guest ─► wait for the main process ─► pass on input and output ─► exited
//!        │                        │                            │ the guest is gone
//!        └────────────────────────┴────────────────────────────┴─► what the log gets of the rest ─► outcome
//! ```

use std::sync::Arc;
use std::time::Duration;

use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{AttachProcess, CloseStdin, ExecInput, ExecOutput, exec_input, exec_output};
use imp_protocol::process::Exit;
use imp_protocol::runtime::{AttachInput, AttachOutput, OpenAttach, attach_input, attach_output};
use imp_runtime::status::{Outcome, State, VmStatus};
use imp_runtime::{GuestHold, LogEnd, LogQuery, LogStream, Runtime, VmId};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::server::{reach, refusal};
use crate::wire;

/// Name of the main process in every guest.
const MAIN: &str = "main";
/// Messages on their way; a client that does not read stops the reading from the guest after so many.
const QUEUE: usize = 8;

/// How long the end of the input of a client that is gone may take to reach the guest.
const LAST_INPUT: Duration = Duration::from_secs(5);

pub(crate) type Answers = mpsc::Sender<Result<AttachOutput, Status>>;

/// Starts the attachment and returns its answers.
pub(crate) fn attach(
    runtime: Runtime,
    id: VmId,
    open: OpenAttach,
    inputs: Streaming<AttachInput>,
) -> Result<ReceiverStream<Result<AttachOutput, Status>>, Status> {
    let status = runtime.watch(&id).map_err(|error| refusal(&error))?;
    let (answers, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let attachment = Attachment { runtime, id, status, answers: answers.clone() };
        if let Err(status) = attachment.run(open, inputs).await {
            // A client that is gone needs no answer.
            let _ = answers.send(Err(status)).await;
        }
    });
    Ok(ReceiverStream::new(stream))
}

struct Attachment {
    runtime: Runtime,
    id: VmId,
    status: watch::Receiver<Arc<VmStatus>>,
    answers: Answers,
}

/// How far the passing on of output came.
enum Passed {
    Exited,
    /// The guest went away; so much of the output had been passed on, or was not kept.
    Broke {
        bytes: u64,
    },
}

impl Attachment {
    async fn run(mut self, open: OpenAttach, inputs: Streaming<AttachInput>) -> Result<(), Status> {
        let answers = self.answers.clone();
        let guest = tokio::select! {
            () = answers.closed() => return Ok(()),
            guest = self.guest() => guest,
        };
        let passed = match guest {
            Some(guest) => self.pass(&guest, &open, inputs).await?,
            None => Passed::Broke { bytes: 0 },
        };
        match passed {
            Passed::Exited => Ok(()),
            Passed::Broke { bytes } => {
                // A client that wanted only what comes got it from the guest, or there was none.
                if let Some(offset) = open.from_offset {
                    tokio::select! {
                        () = answers.closed() => return Ok(()),
                        replayed = self.replay(offset.saturating_add(bytes)) => replayed?,
                    }
                }
                tokio::select! {
                    () = answers.closed() => Ok(()),
                    ended = self.end() => ended,
                }
            }
        }
    }

    /// The guest, once its main process has been started; none when the VM has stopped instead.
    async fn guest(&mut self) -> Option<GuestHold> {
        let mut hold = None;
        loop {
            let state = self.status.borrow_and_update().clone();
            if hold.is_none() && state.agent.is_some() && state.state != State::Stopped {
                // Held from before the start on: a main process that ends at once is not missed.
                hold = self.runtime.connection(&self.id).await.ok();
            }
            match state.state {
                State::Created | State::Starting => {}
                State::Running | State::Stopping if hold.is_some() => return hold,
                // This owner has just taken the VM over, and has yet to find the guest.
                State::Running | State::Stopping => return reach(&self.runtime, &self.id).await.ok(),
                State::Stopped => return None,
            }
            self.status.changed().await.ok()?;
        }
    }

    async fn pass(
        &self,
        guest: &GuestHold,
        open: &OpenAttach,
        mut inputs: Streaming<AttachInput>,
    ) -> Result<Passed, Status> {
        let (to_guest, guest_inputs) = mpsc::channel(QUEUE);
        let attach = AttachProcess {
            id: MAIN.to_owned(),
            stdin: open.stdin,
            from_offset: open.from_offset.unwrap_or(u64::MAX),
            paced: true,
        };
        let first = ExecInput { input: Some(exec_input::Input::Attach(attach)) };
        let _ = to_guest.try_send(first);
        let mut client = ProcessesClient::new(guest.connection());
        let Ok(outputs) = client.exec(ReceiverStream::new(guest_inputs)).await else {
            return Ok(Passed::Broke { bytes: 0 });
        };
        let stdin_once = open.stdin_once;
        let forward = async move {
            while let Ok(Some(AttachInput { message })) = inputs.message().await {
                if let Some(attach_input::Message::Input(input)) = message
                    && to_guest.send(input).await.is_err()
                {
                    break;
                }
            }
            if stdin_once {
                let close = exec_input::Input::CloseStdin(CloseStdin {});
                let _ = to_guest.send(ExecInput { input: Some(close) }).await;
                return;
            }
            // The guest takes the end of its inputs for the end of the attachment.
            to_guest.closed().await;
        };
        let forward = tokio::spawn(forward);
        let mut outputs = outputs.into_inner();
        let passed = self.pass_outputs(&mut outputs).await;
        if passed.is_ok() {
            forward.abort();
        } else if stdin_once {
            // The client is gone, and the end of the input is on its way: it would not outlive its stream.
            let rest = async { while let Ok(Some(_)) = outputs.message().await {} };
            let _ = tokio::time::timeout(LAST_INPUT, rest).await;
        }
        passed
    }

    async fn pass_outputs(&self, outputs: &mut Streaming<ExecOutput>) -> Result<Passed, Status> {
        let mut bytes = 0;
        loop {
            let output = tokio::select! {
                () = self.answers.closed() => return Err(hung_up()),
                output = outputs.message() => output,
            };
            let Ok(Some(output)) = output else { return Ok(Passed::Broke { bytes }) };
            let last = matches!(output.output, Some(exec_output::Output::Exited(_)));
            bytes += match &output.output {
                Some(exec_output::Output::Stdout(data) | exec_output::Output::Stderr(data)) => {
                    data.len() as u64
                }
                Some(exec_output::Output::Dropped(bytes)) => *bytes,
                Some(
                    exec_output::Output::Started(_)
                    | exec_output::Output::StdinTaken(_)
                    | exec_output::Output::Exited(_),
                )
                | None => 0,
            };
            self.answer(attach_output::Message::Output(output)).await?;
            if last {
                return Ok(Passed::Exited);
            }
        }
    }

    /// What the log has from a position on, and gets: the guest went away, and if its VM has not ended it may come back.
    async fn replay(&self, offset: u64) -> Result<(), Status> {
        let query = LogQuery { end: LogEnd::Follow, ..LogQuery::default() };
        // No log: the process never ran, or its VM has been removed.
        let Ok(mut log) = self.runtime.logs(&self.id, query).await else { return Ok(()) };
        while let Ok(Some(entry)) = log.next().await {
            let Some(entry) = entry.from_offset(offset) else { continue };
            let data = entry.data.into();
            let output = match entry.stream {
                LogStream::Stdout => exec_output::Output::Stdout(data),
                LogStream::Stderr => exec_output::Output::Stderr(data),
            };
            self.answer(attach_output::Message::Output(ExecOutput { output: Some(output) })).await?;
        }
        Ok(())
    }

    /// Waits until it is known how the VM ended, and says so.
    async fn end(&mut self) -> Result<(), Status> {
        // An error: the VM has been removed, and the last status stays.
        let _ = self.status.wait_for(|status| status.state == State::Stopped).await;
        let status = self.status.borrow().clone();
        let message = match exit_of(&status) {
            Some(exit) => {
                let output = exec_output::Output::Exited(exit.into());
                attach_output::Message::Output(ExecOutput { output: Some(output) })
            }
            None => {
                let status =
                    wire::status_to_wire(&status).map_err(|error| Status::internal(error.to_string()))?;
                attach_output::Message::Failed(status)
            }
        };
        self.answer(message).await
    }

    async fn answer(&self, message: attach_output::Message) -> Result<(), Status> {
        let answer = AttachOutput { message: Some(message) };
        self.answers.send(Ok(answer)).await.map_err(|_| hung_up())
    }
}

fn hung_up() -> Status {
    Status::cancelled("the client has hung up")
}

/// How the main process ended, if that is what ended the VM.
fn exit_of(status: &VmStatus) -> Option<Exit> {
    match status.outcome.as_ref()? {
        Outcome::Exited { code } => Some(Exit::Code(*code)),
        Outcome::Signalled { signal, out_of_memory, timed_out } => {
            Some(Exit::Signal { signal: *signal, out_of_memory: *out_of_memory, timed_out: *timed_out })
        }
        Outcome::NotStarted { why, code } => Some(Exit::NotStarted { reason: why.clone(), code: *code }),
        Outcome::PoweredOff => Some(Exit::Code(0)),
        Outcome::Killed => Some(Exit::Signal { signal: 9, out_of_memory: false, timed_out: false }),
        Outcome::Failed { .. } => None,
    }
}
