//! The service that starts processes in the guest, carries their input and output, and tells how they ended.

mod inherit;
mod journal;
mod kernel_log;
mod listing;
mod pace;
mod process;
mod pump;
pub(crate) mod signal;
pub(crate) mod spec;
mod start;
mod table;
mod tree;

use std::sync::Arc;
use std::time::Duration;

use imp_protocol::causes::chain;
use imp_protocol::guest::exec_input::Input as Message;
use imp_protocol::guest::exec_output::Output as Answer;
use imp_protocol::guest::exit_status::How;
use imp_protocol::guest::processes_server::Processes;
use imp_protocol::guest::{
    AttachProcess, ExecInput, ExecOutput, ExitStatus, ListProcessesRequest, ListProcessesResponse,
    ProcessSpec, ProcessStarted, SignalRequest, SignalResponse, WaitRequest, WaitResponse, signal_request,
};
use imp_sys::child::{Error as SpawnError, Step};
use imp_sys::signals::Number;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use self::inherit::MainProcess;
use self::journal::{Output, Reader, Source};
use self::pace::Pace;
use self::process::{Input, Process};
use self::spec::{Launch, ProcessId, Size};
use crate::accounts::Accounts;
use crate::agent::{Agent, Guest};
use crate::init::handover;

pub(crate) use self::listing::{count, is_kernel_thread};
pub(crate) use self::process::Scope;
pub(crate) use self::spec::Life;
pub(crate) use self::table::Table;
pub(crate) use self::tree::{Forest, members_below};

/// A host that opens a stream says at once what it wants.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// Time that the host of a stream that a snapshot broke has to attach to its process.
const ATTACHES: Duration = Duration::from_secs(30);
/// Answers that wait for a host that does not read.
const WAITING_ANSWERS: usize = 2;

type Answers = mpsc::Sender<Result<ExecOutput, Status>>;

#[tonic::async_trait]
impl Processes for Guest {
    type ExecStream = ReceiverStream<Result<ExecOutput, Status>>;

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let (answers, stream) = mpsc::channel(WAITING_ANSWERS);
        let agent = Arc::clone(&self.0);
        // A task of its own: when the host breaks the stream, somebody must be there to kill what was started.
        tokio::spawn(async move {
            if let Err(status) = agent.converse(request.into_inner(), &answers).await {
                let _ = answers.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list(
        &self,
        _: Request<ListProcessesRequest>,
    ) -> Result<Response<ListProcessesResponse>, Status> {
        let processes = crate::blocking(listing::all).await?;
        Ok(Response::new(ListProcessesResponse { processes }))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<SignalResponse>, Status> {
        let SignalRequest { target, signal, whole_tree } = request.into_inner();
        let wanted = match signal.as_str() {
            "" => None,
            name => Some(signal::parse(name).map_err(|error| Status::invalid_argument(error.to_string()))?),
        };
        let scope = if whole_tree { Scope::Tree } else { Scope::Process };
        let process = match target {
            None => return Err(Status::invalid_argument("name a process by `id` or `pid`")),
            Some(signal_request::Target::Id(id)) => self.known(&id)?,
            Some(signal_request::Target::Pid(pid)) => {
                match self.processes().running().into_iter().find(|process| process.pid == pid) {
                    Some(started) => started,
                    None => {
                        let signal = wanted.unwrap_or(Number::TERM);
                        crate::blocking(move || signal::send_to_other(pid, signal, scope)).await??;
                        return Ok(Response::new(SignalResponse {}));
                    }
                }
            }
        };
        let send = move || match wanted {
            Some(signal) => process.signal(signal, scope),
            None => process.ask_to_stop(),
        };
        crate::blocking(send).await?;
        Ok(Response::new(SignalResponse {}))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        let WaitRequest { id, acknowledge } = request.into_inner();
        let process = self.known(&id)?;
        let status = process.exited().await;
        if acknowledge {
            self.processes().forget(&process.id);
        }
        Ok(Response::new(WaitResponse { status: Some(status) }))
    }
}

impl Agent {
    /// One stream of Exec, from its first message to its end.
    async fn converse(
        self: &Arc<Self>,
        mut inputs: Streaming<ExecInput>,
        answers: &Answers,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(FIRST_MESSAGE, inputs.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no `start` or `attach` came"))??;
        match first.and_then(|first| first.input) {
            Some(Message::Start(spec)) => self.start(spec, inputs, answers).await,
            Some(Message::Attach(attach)) => self.attach(&attach, inputs, answers).await,
            _ => Err(Status::invalid_argument("the first message must be `start` or `attach`")),
        }
    }

    async fn start(
        self: &Arc<Self>,
        mut spec: ProcessSpec,
        inputs: Streaming<ExecInput>,
        answers: &Answers,
    ) -> Result<(), Status> {
        let agent = Arc::clone(self);
        let main = self.processes().main();
        let pacing = if spec.paced { Pacing::Wanted } else { Pacing::None };
        if spec.id == spec::MAIN {
            // A second one is refused below.
            let _ = main.set(MainProcess::of(&spec));
        }
        // What is asked for by name wins over what the machine was given, and that over what the image says.
        let given = self.inherited().all();
        spec.environment.splice(..0, given);
        if spec.id != spec::MAIN
            && let (true, Some(main)) = (spec.as_main, main.get())
        {
            main.fill(&mut spec);
        }
        let start = self.gate().start().await?;
        let (reservation, launch, started) = crate::blocking(move || {
            let _held = start;
            let launch = Launch::parse(spec, &Accounts::read())
                .map_err(|error| Status::invalid_argument(error.to_string()))?;
            let reservation = agent.processes().reserve(launch.id.clone()).map_err(|error| match error {
                table::Error::Taken(_) => Status::already_exists(error.to_string()),
                table::Error::Full => Status::resource_exhausted(error.to_string()),
            })?;
            let becomes_init = reservation.id().is_main() && handover::is_init(&launch.arguments);
            let started = match agent.supervisor().filter(|_| becomes_init) {
                Some(supervisor) => {
                    supervisor.become_init(&launch).map(|()| None).map_err(NotStarted::from_handover)
                }
                None => start::start(reservation.id(), &launch, agent.forest(), agent.null())
                    .map(Some)
                    .map_err(NotStarted::from_start),
            };
            Ok::<_, Status>((reservation, launch, started))
        })
        .await??;
        let (process, reader) = match started {
            Ok(Some(started)) => {
                let agent = Arc::clone(self);
                Process::take_charge(reservation, &launch, started, move |process| {
                    agent.process_ended(process)
                })
                .map_err(|error| {
                    Status::resource_exhausted(format!("the process could not be supervised: {error}"))
                })?
            }
            Ok(None) => Process::init(reservation, launch.stop_signal),
            Err(NotStarted::Program(status)) => {
                exited(answers, status).await;
                return Ok(());
            }
            Err(NotStarted::Refused(status)) => return Err(status),
        };
        let pace = Pace::new();
        let taken = pacing.of(&pace);
        let feed = Feed::spawn(&process, inputs, Stdin::Taken, pace);
        let holder = process.hold();
        let end = follow(&process, reader, taken, answers).await;
        drop((feed, holder));
        if end.is_err() { self.let_go(process).await } else { Ok(()) }
    }

    /// Ends a process whose stream broke. A snapshot breaks streams, too, and says nothing of their hosts: those may attach.
    async fn let_go(&self, process: Arc<Process>) -> Result<(), Status> {
        let lives = || process.life == Life::OfItsStream && process.exit().is_none();
        if lives() && self.gate().excuses_a_break() {
            self.gate().awake().await;
            if process.is_held_within(ATTACHES).await {
                return Ok(());
            }
        }
        if lives() {
            crate::blocking(move || process.signal(Number::KILL, Scope::Tree)).await?;
        }
        Ok(())
    }

    async fn attach(
        &self,
        attach: &AttachProcess,
        inputs: Streaming<ExecInput>,
        answers: &Answers,
    ) -> Result<(), Status> {
        let process = self.known(&attach.id)?;
        let reader = process.read_from(attach.from_offset);
        let pacing = if attach.paced { Pacing::Wanted } else { Pacing::None };
        let pace = Pace::new();
        let taken = pacing.of(&pace);
        let stdin = if attach.stdin { Stdin::Taken } else { Stdin::Ignored };
        let feed = Feed::spawn(&process, inputs, stdin, pace);
        let holder = process.hold();
        let end = follow(&process, reader, taken, answers).await;
        drop((feed, holder));
        if end.is_err() && !process.is_held_within(Duration::ZERO).await {
            self.let_go(process).await?;
        }
        Ok(())
    }

    fn known(&self, id: &str) -> Result<Arc<Process>, Status> {
        let id = ProcessId::parse(id).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.processes().get(&id).ok_or_else(|| {
            Status::not_found(format!(
                "no process {:?}: it was not started here, or its exit is forgotten",
                id.as_str()
            ))
        })
    }

    fn process_ended(self: &Arc<Self>, process: &Arc<Process>) {
        self.processes().ended(&process.id);
        if process.id.is_main() {
            self.main_ended();
        }
    }
}

/// The host has gone away.
struct HungUp;

/// Whether the host is told how much of its input the process has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pacing {
    Wanted,
    None,
}

impl Pacing {
    fn of(self, pace: &Pace) -> Option<watch::Receiver<u64>> {
        (self == Self::Wanted).then(|| pace.taken())
    }
}

/// Carries a process's output, and at last its exit, to the host. `taken`: what it has taken of the host's input.
async fn follow(
    process: &Process,
    mut reader: Reader,
    mut taken: Option<watch::Receiver<u64>>,
    answers: &Answers,
) -> Result<(), HungUp> {
    let started = Answer::Started(ProcessStarted {
        id: process.id.as_str().to_owned(),
        pid: process.pid,
        stdin_window: taken.as_ref().map_or(0, |_| pace::WINDOW),
    });
    send(answers, started).await?;
    loop {
        let output = tokio::select! {
            biased;
            taken = next_taken(&mut taken) => {
                send(answers, Answer::StdinTaken(taken)).await?;
                continue;
            }
            output = reader.next() => output,
            () = answers.closed() => return Err(HungUp),
        };
        match output {
            Some(Output::Data(Source::Stdout, bytes)) => send(answers, Answer::Stdout(bytes)).await?,
            Some(Output::Data(Source::Stderr, bytes)) => send(answers, Answer::Stderr(bytes)).await?,
            Some(Output::Dropped(bytes)) => send(answers, Answer::Dropped(bytes)).await?,
            None => return send(answers, Answer::Exited(process.exited().await)).await,
        }
    }
}

/// Pending where nobody asked, and when there will be no more input.
async fn next_taken(taken: &mut Option<watch::Receiver<u64>>) -> u64 {
    if let Some(receiver) = taken
        && receiver.changed().await.is_ok()
    {
        return *receiver.borrow_and_update();
    }
    std::future::pending().await
}

async fn send(answers: &Answers, output: Answer) -> Result<(), HungUp> {
    answers.send(Ok(ExecOutput { output: Some(output) })).await.map_err(|_| HungUp)
}

async fn exited(answers: &Answers, status: ExitStatus) {
    let _ = send(answers, Answer::Exited(status)).await;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stdin {
    Taken,
    Ignored,
}

/// Carries the host's messages to a process; ends when dropped.
struct Feed(tokio::task::JoinHandle<()>);

impl Feed {
    fn spawn(process: &Arc<Process>, mut inputs: Streaming<ExecInput>, stdin: Stdin, mut pace: Pace) -> Self {
        let process = Arc::clone(process);
        Self(tokio::spawn(async move {
            loop {
                match inputs.message().await {
                    Ok(Some(message)) => feed(&process, message, stdin, &mut pace).await,
                    Ok(None) => break,
                    // It is for the whole stream to say what becomes of the process.
                    Err(_) => return,
                }
            }
            // A host that sends nothing more has no more input either; a detached process may get some from the next host.
            if stdin == Stdin::Taken && process.life == Life::OfItsStream {
                process.feed(Input::End);
            }
        }))
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Messages that make no sense here are passed over: the stream goes on.
async fn feed(process: &Arc<Process>, message: ExecInput, stdin: Stdin, pace: &mut Pace) {
    match message.input {
        Some(Message::Stdin(bytes)) if stdin == Stdin::Taken => {
            process.feed(Input::Data(pace.portion(bytes).await));
        }
        Some(Message::CloseStdin(_)) if stdin == Stdin::Taken => process.feed(Input::End),
        Some(Message::Resize(terminal)) => {
            if let Ok(size) = Size::parse(&terminal) {
                process.resize(size);
            }
        }
        Some(Message::Signal(name)) => {
            if let Ok(signal) = signal::parse(&name) {
                process.signal(signal, Scope::Tree);
            }
        }
        Some(Message::Stdin(_) | Message::CloseStdin(_) | Message::Start(_) | Message::Attach(_)) | None => {}
    }
}

/// Why nothing runs: the program's fault, which the host is told as an exit, or the request's or the machine's.
enum NotStarted {
    Program(ExitStatus),
    Refused(Status),
}

impl NotStarted {
    fn from_start(error: start::Error) -> Self {
        match error {
            start::Error::Spawn(SpawnError::Child { step: Step::Program, source }) => Self::program(&source),
            start::Error::Spawn(SpawnError::Child { step: Step::Directory, source }) => {
                Self::because(format!("the working directory cannot be entered: {source}"), 126)
            }
            start::Error::Directory { .. } => Self::because(chain(&error), 126),
            start::Error::Tree(tree::Error::Limit { .. } | tree::Error::NoCgroups) => {
                Self::Refused(Status::failed_precondition(chain(&error)))
            }
            start::Error::Tree(tree::Error::Make { .. })
            | start::Error::Descriptors(_)
            | start::Error::Spawn(_) => Self::Refused(Status::resource_exhausted(chain(&error))),
        }
    }

    fn from_handover(error: handover::Error) -> Self {
        match error {
            handover::Error::Program(source) => Self::program(&source),
            handover::Error::Channel(_) => Self::Refused(Status::unavailable(chain(&error))),
        }
    }

    fn program(source: &std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                Self::because("no such program in the guest".to_owned(), 127)
            }
            _ => Self::because(format!("the program cannot be executed: {source}"), 126),
        }
    }

    fn because(not_started: String, start_code: u32) -> Self {
        Self::Program(ExitStatus {
            how: Some(How::NotStarted(not_started)),
            start_code,
            ..Default::default()
        })
    }
}
