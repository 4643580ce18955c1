//! Attaches a client to the main process of a VM, from before its start until its end is known.
//!
//! ```text
//!          ┌────────────── the channel broke ──────────────┐
//!          ▼                                               │
//! wait for the guest ─► pass on input and output ──────────┴─► exited
//!          │                        │ the guest knows of no such process any more
//!          │ the VM has stopped     │
//!          └────────────────────────┴─► what the log has of the rest ─► outcome
//! ```

mod relay;

use std::sync::Arc;

use imp_protocol::guest::{ExecOutput, exec_output};
use imp_protocol::process::Exit;
use imp_protocol::runtime::{AttachInput, AttachOutput, OpenAttach, attach_output};
use imp_runtime::status::{Outcome, State, VmStatus};
use imp_runtime::{GuestHold, LogEnd, LogQuery, Runtime, VmId};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use self::relay::{Client, Passed, Relay, Stdin};
use crate::refusal::refusal;
use crate::wire;

/// Messages on their way; a client that does not read stops the reading from the guest after so many.
const QUEUE: usize = 8;

type Answers = mpsc::Sender<Result<AttachOutput, Status>>;

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
        let mut attachment = Attachment { runtime, id, status };
        let stdin = match (open.stdin, open.stdin_once) {
            (false, _) => Stdin::None,
            (true, false) => Stdin::Shared,
            (true, true) => Stdin::Once,
        };
        let client = Client::new(Box::pin(inputs), stdin, answers.clone());
        if let Err(status) = attachment.run(open.from_offset, client).await {
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
}

impl Attachment {
    async fn run(&mut self, from_offset: Option<u64>, client: Client) -> Result<(), Status> {
        let position = match from_offset {
            Some(offset) => offset,
            // From now on, which is what is not recorded yet: known also when the guest goes away and comes back.
            None => self.runtime.recorded(&self.id).await.map_err(|error| refusal(&error))?,
        };
        let mut relay = Relay::new(client, position);
        loop {
            let guest = tokio::select! {
                () = relay.client_gone() => return Ok(()),
                guest = self.guest() => guest,
            };
            let Some(guest) = guest else { break };
            match relay.pass(guest.connection()).await? {
                Passed::Exited => return Ok(()),
                Passed::Broke => {}
                Passed::Gone => break,
            }
        }
        self.replay(&mut relay).await?;
        let ended = tokio::select! {
            () = relay.client_gone() => return Ok(()),
            ended = self.end() => ended?,
        };
        relay.answer(ended).await
    }

    /// The guest, once its main process has been started; none when the VM has stopped instead.
    async fn guest(&mut self) -> Option<GuestHold> {
        let mut hold = None;
        loop {
            let vm = self.status.borrow_and_update().clone();
            match vm.state {
                State::Created => {}
                // Held from before the start on: a main process that ends at once is not missed.
                State::Starting if hold.is_none() && vm.agent.is_some() => {
                    hold = self.runtime.connection(&self.id).await.ok();
                }
                State::Starting | State::Prepared => {}
                // The channel may be broken, or this owner has just taken the VM over and has yet to find the guest.
                State::Running | State::Asleep | State::Paused | State::Stopping => {
                    return self.runtime.connected(&self.id).await.ok();
                }
                State::Stopped => return None,
            }
            self.status.changed().await.ok()?;
        }
    }

    /// What the log has of the rest, and gets.
    async fn replay(&self, relay: &mut Relay) -> Result<(), Status> {
        let query = LogQuery { end: LogEnd::Follow, ..LogQuery::default() };
        // No log: the process never ran, or its VM has been removed.
        let Ok(mut log) = self.runtime.logs(&self.id, query).await else { return Ok(()) };
        loop {
            let entry = tokio::select! {
                () = relay.client_gone() => return Ok(()),
                entry = log.next() => entry,
            };
            // What cannot be read is missing; how the process ended is not.
            let Ok(Some(entry)) = entry else { return Ok(()) };
            relay.replay(entry).await?;
        }
    }

    /// Waits until it is known how the VM ended.
    async fn end(&mut self) -> Result<attach_output::Message, Status> {
        // An error: the VM has been removed, and the last status stays.
        let _ = self.status.wait_for(|status| status.state == State::Stopped).await;
        let status = self.status.borrow().clone();
        match exit_of(&status) {
            Some(exit) => {
                let output = exec_output::Output::Exited(exit.into());
                Ok(attach_output::Message::Output(ExecOutput { output: Some(output) }))
            }
            None => wire::status_to_wire(&status)
                .map(attach_output::Message::Failed)
                .map_err(|error| Status::internal(error.to_string())),
        }
    }
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
