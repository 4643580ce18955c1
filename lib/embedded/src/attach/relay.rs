//! One client's view of a main process, over one connection to its guest after another, and from its log.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use imp_protocol::connection::Connection;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{AttachProcess, CloseStdin, ExecInput, ExecOutput, exec_input, exec_output};
use imp_protocol::runtime::{AttachInput, AttachOutput, attach_input, attach_output};
use imp_runtime::{LogEntry, LogStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{Answers, QUEUE};

/// Name of the main process in every guest.
const MAIN: &str = "main";
/// How long the end of the input of a client that is gone may take to reach the guest.
const LAST_INPUT: Duration = Duration::from_secs(5);
/// A call fails a moment before its connection is seen to have broken.
const BREAK_IS_SEEN: Duration = Duration::from_secs(1);

type Inputs = Pin<Box<dyn Stream<Item = Result<AttachInput, Status>> + Send>>;

/// What becomes of the client's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stdin {
    None,
    /// Stays open for others when this client hangs up.
    Shared,
    /// Closed when this client hangs up.
    Once,
}

/// The client's two directions.
pub(super) struct Client {
    inputs: Inputs,
    stdin: Stdin,
    answers: Answers,
    /// Bytes of input that came from it.
    sent: u64,
    /// Whether the end of the process's input was asked for.
    closed: bool,
    hung_up: bool,
}

/// How the passing on of output over one connection ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Passed {
    Exited,
    /// The channel broke; the guest may come back.
    Broke,
    /// The guest knows of no main process any more.
    Gone,
}

pub(super) struct Relay {
    client: Client,
    /// Position in the process's whole output up to which the client has it.
    position: u64,
    /// Bytes of the client's input that are no longer on their way.
    taken: u64,
    started: bool,
}

impl Client {
    pub(super) fn new(inputs: Inputs, stdin: Stdin, answers: Answers) -> Self {
        Self { inputs, stdin, answers, sent: 0, closed: false, hung_up: false }
    }

    /// Passes input on over one connection to the guest, until the client hangs up and after that until the guest does.
    async fn feed(&mut self, guest: mpsc::Sender<ExecInput>) {
        if self.closed && !close(&guest).await {
            return;
        }
        while !self.hung_up {
            match self.inputs.next().await {
                Some(Ok(AttachInput { message: Some(attach_input::Message::Input(input)) })) => {
                    match &input.input {
                        Some(exec_input::Input::Stdin(data)) => self.sent += data.len() as u64,
                        Some(exec_input::Input::CloseStdin(_)) => self.closed = true,
                        Some(
                            exec_input::Input::Start(_)
                            | exec_input::Input::Attach(_)
                            | exec_input::Input::Resize(_)
                            | exec_input::Input::Signal(_),
                        )
                        | None => {}
                    }
                    if guest.send(input).await.is_err() {
                        return;
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => self.hung_up = true,
            }
        }
        if self.stdin == Stdin::Once {
            self.closed = true;
            close(&guest).await;
        }
        // The guest takes the end of its inputs for the end of the attachment.
        guest.closed().await;
    }
}

async fn close(guest: &mpsc::Sender<ExecInput>) -> bool {
    let close = exec_input::Input::CloseStdin(CloseStdin {});
    guest.send(ExecInput { input: Some(close) }).await.is_ok()
}

impl Relay {
    pub(super) fn new(client: Client, position: u64) -> Self {
        Self { client, position, taken: 0, started: false }
    }

    /// Waits until the client takes no more output.
    pub(super) async fn client_gone(&mut self) {
        self.client.answers.closed().await;
    }

    /// Attaches to the process over a connection to its guest, from where the last one came to.
    pub(super) async fn pass(&mut self, guest: Connection) -> Result<Passed, Status> {
        if self.client.stdin == Stdin::Once && self.taken < self.client.sent {
            // A program that reads a file must not get it with a hole.
            return Err(Status::data_loss(
                "the channel to the guest broke while input was on its way: some of it may be lost",
            ));
        }
        // What was on its way when the channel broke has come, or never will.
        self.taken = self.client.sent;
        let (to_guest, guest_inputs) = mpsc::channel(QUEUE);
        let attach = AttachProcess {
            id: MAIN.to_owned(),
            stdin: self.client.stdin != Stdin::None,
            from_offset: self.position,
            paced: true,
        };
        let first = ExecInput { input: Some(exec_input::Input::Attach(attach)) };
        let _ = to_guest.try_send(first);
        let mut processes = ProcessesClient::new(guest.clone());
        let mut outputs = match processes.exec(ReceiverStream::new(guest_inputs)).await {
            Ok(outputs) => outputs.into_inner(),
            Err(status) => return ended(&guest, Some(status)).await,
        };
        let Self { client, position, taken, started } = self;
        let answers = client.answers.clone();
        let once = client.stdin == Stdin::Once;
        let mut feed = pin!(client.feed(to_guest));
        let mut fed = false;
        let passed = {
            let output = Output { answers, position, taken, started };
            let mut passing = pin!(output.pass(&mut outputs));
            loop {
                tokio::select! {
                    passed = &mut passing => break passed,
                    () = &mut feed, if !fed => fed = true,
                }
            }
        };
        match passed {
            Ok(End::Exited) => Ok(Passed::Exited),
            Ok(End::Ended(status)) => ended(&guest, status).await,
            Err(HungUp) => {
                if once {
                    // The end of the input is on its way: it would not outlive its stream.
                    let rest = async { while let Ok(Some(_)) = outputs.message().await {} };
                    let feed = async {
                        if !fed {
                            feed.await;
                        }
                    };
                    let _ = tokio::time::timeout(LAST_INPUT, futures_util::future::join(feed, rest)).await;
                }
                Err(hung_up())
            }
        }
    }

    /// Passes on what an entry of the log has beyond what the client has; what is missing before it is told.
    pub(super) async fn replay(&mut self, entry: LogEntry) -> Result<(), Status> {
        let Some(entry) = entry.from_offset(self.position) else { return Ok(()) };
        let missing = entry.offset.saturating_sub(self.position);
        if missing > 0 {
            self.output(exec_output::Output::Dropped(missing)).await?;
        }
        self.position = entry.end();
        let data = entry.data.into();
        self.output(match entry.stream {
            LogStream::Stdout => exec_output::Output::Stdout(data),
            LogStream::Stderr => exec_output::Output::Stderr(data),
            // Told already.
            LogStream::Note => return Ok(()),
        })
        .await
    }

    async fn output(&mut self, output: exec_output::Output) -> Result<(), Status> {
        self.answer(attach_output::Message::Output(ExecOutput { output: Some(output) })).await
    }

    pub(super) async fn answer(&mut self, message: attach_output::Message) -> Result<(), Status> {
        let answer = AttachOutput { message: Some(message) };
        self.client.answers.send(Ok(answer)).await.map_err(|_| hung_up())
    }
}

fn hung_up() -> Status {
    Status::cancelled("the client has hung up")
}

/// What the end of a call says: the channel has broken, or the guest does not want to go on.
async fn ended(guest: &Connection, status: Option<Status>) -> Result<Passed, Status> {
    if status.as_ref().is_some_and(|status| status.code() == Code::NotFound) {
        return Ok(Passed::Gone);
    }
    if tokio::time::timeout(BREAK_IS_SEEN, guest.closed()).await.is_ok() {
        return Ok(Passed::Broke);
    }
    let why = status.map_or_else(|| "it ended the stream".to_owned(), |status| status.message().to_owned());
    Err(Status::unavailable(format!("the guest does not pass on the program's output: {why}")))
}

/// The client takes no more output.
struct HungUp;

/// How the outputs of one call ended.
enum End {
    Exited,
    /// Without an exit; absent: in an orderly way.
    Ended(Option<Status>),
}

/// What one connection to the guest says, on its way to the client.
struct Output<'a> {
    answers: Answers,
    position: &'a mut u64,
    taken: &'a mut u64,
    started: &'a mut bool,
}

impl Output<'_> {
    async fn pass(self, outputs: &mut Streaming<ExecOutput>) -> Result<End, HungUp> {
        let taken_before = *self.taken;
        loop {
            let output = tokio::select! {
                () = self.answers.closed() => return Err(HungUp),
                output = outputs.message() => output,
            };
            let output = match output {
                Ok(Some(output)) => output,
                Ok(None) => return Ok(End::Ended(None)),
                Err(status) => return Ok(End::Ended(Some(status))),
            };
            // Counted with what the client has sent over earlier connections.
            let output = match output.output {
                Some(exec_output::Output::StdinTaken(bytes)) => {
                    *self.taken = taken_before.saturating_add(bytes);
                    exec_output::Output::StdinTaken(*self.taken)
                }
                Some(exec_output::Output::Started(_)) if *self.started => {
                    exec_output::Output::StdinTaken(*self.taken)
                }
                Some(output) => output,
                None => continue,
            };
            let length = match &output {
                exec_output::Output::Stdout(data) | exec_output::Output::Stderr(data) => data.len() as u64,
                exec_output::Output::Dropped(bytes) => *bytes,
                exec_output::Output::Started(_)
                | exec_output::Output::StdinTaken(_)
                | exec_output::Output::Exited(_) => 0,
            };
            *self.started |= matches!(output, exec_output::Output::Started(_));
            let last = matches!(output, exec_output::Output::Exited(_));
            let message = attach_output::Message::Output(ExecOutput { output: Some(output) });
            self.answers.send(Ok(AttachOutput { message: Some(message) })).await.map_err(|_| HungUp)?;
            *self.position = self.position.saturating_add(length);
            if last {
                return Ok(End::Exited);
            }
        }
    }
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
