//! A program in a guest at the user's terminal: its output, the user's input, signals and window size, until it ends.

mod interrupts;
mod stdin;

use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use imp_embedded::client::{self, Attached, AttachedInput, Event};
use imp_protocol::guest::ExecInput;
use imp_protocol::process::{Exit, Input, Output, Session};
use imp_runtime::status::VmStatus;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::stdin::Room;
use crate::output;
use crate::terminal::{self, DetachFilter, DetachKeys, RawMode};

pub(crate) use self::interrupts::{Interrupts, exit_status};

/// So many requests to end make the command end without its program, as docker does it.
const IMPATIENCE: u32 = 3;
/// How long a program may take to end when nobody reads its output any more.
const LAST_OUTPUT: Duration = Duration::from_secs(5);

/// The program that the session is about.
pub(crate) enum Program {
    /// Started by `imp exec`.
    Exec(Box<Session>),
    /// The main process of a VM.
    Main(Box<Attached>),
}

#[derive(Clone)]
enum ProgramInput {
    Exec(mpsc::Sender<ExecInput>),
    Main(AttachedInput),
}

impl Program {
    fn input(&self) -> ProgramInput {
        match self {
            Self::Exec(session) => ProgramInput::Exec(session.input()),
            Self::Main(attached) => ProgramInput::Main(attached.input()),
        }
    }

    pub(crate) async fn next(&mut self) -> anyhow::Result<Event> {
        match self {
            Self::Exec(session) => Ok(Event::Output(session.next().await.map_err(client::Error::from)?)),
            Self::Main(attached) => Ok(attached.next().await?),
        }
    }
}

impl ProgramInput {
    /// False: nothing more is taken.
    async fn send(&self, input: Input) -> bool {
        match self {
            Self::Exec(sender) => sender.send(input.into()).await.is_ok(),
            Self::Main(sender) => sender.send(input).await,
        }
    }
}

/// How the program is connected to the user.
#[derive(Debug, Clone)]
pub(crate) struct Wiring {
    pub(crate) stdin: Stdin,
    pub(crate) terminal: Terminal,
    pub(crate) signals: Signals,
    pub(crate) reader: Reader,
    pub(crate) detach_keys: DetachKeys,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stdin {
    Sent,
    /// Its end is not passed on: somebody else may have more for the program.
    SentWithoutEnd,
    None,
}

/// Whether the program has a terminal of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terminal {
    Own,
    None,
}

/// What becomes of signals to this command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signals {
    PassedOn,
    /// They end this command, and the program goes on.
    Kept,
}

/// Who reads the program's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Only whoever reads this command's: the program hears of it when they go away.
    Only,
    /// Others may: it is nothing to the program that one goes away.
    OneOfMany,
}

/// How a session ended.
#[derive(Debug)]
pub(crate) enum End {
    Exited(Exit),
    /// The VM ended without an exit status.
    Failed(Box<VmStatus>),
    /// The user let go of the program; it goes on.
    Detached,
    /// A signal came before the program had started.
    Interrupted(SignalKind),
    /// A signal ends this command and not the program: it was not to be passed on, or it came too often.
    LeftRunning(SignalKind),
    /// Nobody reads the output any more.
    BrokenPipe,
}

/// What happens beside the program's output.
enum Aside {
    Detached,
}

/// How much of the program's output was written, also over several sessions with it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    /// When the first of them was.
    pub(crate) first: Option<Instant>,
}

/// Runs the session to its end.
pub(crate) async fn run(
    program: &mut Program,
    wiring: &Wiring,
    interrupts: &mut Interrupts,
    written: &mut Written,
) -> anyhow::Result<End> {
    let raw = match (wiring.terminal, wiring.stdin) {
        (Terminal::Own, Stdin::Sent | Stdin::SentWithoutEnd) if terminal::is_terminal(std::io::stdin()) => {
            Some(RawMode::enter().context("cannot set the terminal to raw mode")?)
        }
        _ => None,
    };
    let input = program.input();
    let (asides, aside) = mpsc::channel(4);
    let (room, room_seen) = watch::channel(Room::default());
    let mut tasks = JoinSet::new();
    if wiring.stdin != Stdin::None {
        let filter = raw.is_some().then(|| DetachFilter::new(wiring.detach_keys.clone()));
        tasks.spawn(stdin::send(input.clone(), wiring.stdin, filter, asides, room_seen));
    }
    if wiring.terminal == Terminal::Own {
        let resizes = signal(SignalKind::window_change()).context("cannot receive signals")?;
        tasks.spawn(send_sizes(input.clone(), resizes));
    }
    let mut pump = Pump {
        input,
        tasks,
        raw,
        room,
        signals: wiring.signals,
        reader: wiring.reader,
        started: Started::NotYet,
        requests_to_end: 0,
    };
    if written.bytes > 0 {
        pump.started()?;
    }
    pump.run(program, aside, interrupts, written).await
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Started {
    NotYet,
    Yes,
}

/// What a session is in the midst of.
struct Pump {
    input: ProgramInput,
    /// They end with the session.
    tasks: JoinSet<()>,
    raw: Option<RawMode>,
    room: watch::Sender<Room>,
    signals: Signals,
    reader: Reader,
    started: Started,
    requests_to_end: u32,
}

impl Pump {
    async fn run(
        &mut self,
        program: &mut Program,
        mut asides: mpsc::Receiver<Aside>,
        interrupts: &mut Interrupts,
        so_far: &mut Written,
    ) -> anyhow::Result<End> {
        let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
        loop {
            let event = tokio::select! {
                event = program.next() => event?,
                Some(Aside::Detached) = asides.recv() => return Ok(End::Detached),
                kind = interrupts.next() => match self.signalled(kind) {
                    Some(end) => return Ok(end),
                    None => continue,
                },
            };
            let (stream, data): (&mut (dyn AsyncWrite + Unpin), _) = match event {
                Event::Failed(status) => return Ok(End::Failed(status)),
                Event::Output(Output::Exited(exit)) => return Ok(End::Exited(exit)),
                Event::Output(Output::Started { stdin_window }) => {
                    self.room.send_modify(|room| room.window = Some(stdin_window.into()));
                    self.started()?;
                    continue;
                }
                Event::Output(Output::StdinTaken(bytes)) => {
                    self.room.send_modify(|room| room.taken = bytes);
                    continue;
                }
                Event::Output(Output::Dropped(bytes)) => {
                    so_far.bytes += bytes;
                    output::warn(&format!("{bytes} bytes of output are missing here"));
                    continue;
                }
                Event::Output(Output::Stdout(data)) => (&mut stdout, data),
                Event::Output(Output::Stderr(data)) => (&mut stderr, data),
            };
            self.started()?;
            let written = {
                let mut writing = pin!(write(stream, &data, so_far));
                // Who reads the output may take their time, and signals come meanwhile.
                loop {
                    tokio::select! {
                        written = &mut writing => break written,
                        kind = interrupts.next() => if let Some(end) = self.signalled(kind) {
                            return Ok(end);
                        },
                    }
                }
            };
            match written {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    match self.reader {
                        Reader::Only => {
                            // What the program would get if it wrote to the pipe itself.
                            self.pass_on("SIGPIPE".to_owned());
                            // One that does not mind goes on without its reader.
                            let _ = tokio::time::timeout(LAST_OUTPUT, until_exit(program)).await;
                        }
                        Reader::OneOfMany => {}
                    }
                    return Ok(End::BrokenPipe);
                }
                Err(error) => return Err(error).context("cannot write the program's output"),
            }
        }
    }

    /// From now on the keys of the terminal are the program's.
    fn started(&mut self) -> anyhow::Result<()> {
        if self.started == Started::NotYet {
            self.started = Started::Yes;
            if let Some(raw) = &self.raw {
                raw.give_to_program().context("cannot set the terminal to raw mode")?;
            }
        }
        Ok(())
    }

    /// What a signal to this command ends, if it ends something.
    fn signalled(&mut self, kind: SignalKind) -> Option<End> {
        match (self.started, self.signals) {
            (Started::NotYet, _) => return Some(End::Interrupted(kind)),
            (Started::Yes, Signals::Kept) => return Some(End::LeftRunning(kind)),
            (Started::Yes, Signals::PassedOn) => {}
        }
        if kind == SignalKind::interrupt() || kind == SignalKind::terminate() {
            self.requests_to_end += 1;
            if self.requests_to_end == IMPATIENCE {
                return Some(End::LeftRunning(kind));
            }
        }
        self.pass_on(interrupts::number(kind).to_string());
        None
    }

    /// Not waited for: a connection that takes nothing must not keep the next signal.
    fn pass_on(&mut self, signal: String) {
        let input = self.input.clone();
        self.tasks.spawn(async move {
            input.send(Input::Signal(signal)).await;
        });
    }
}

async fn until_exit(program: &mut Program) {
    while let Ok(event) = program.next().await {
        if matches!(event, Event::Failed(_) | Event::Output(Output::Exited(_))) {
            return;
        }
    }
}

async fn write(
    stream: &mut (dyn AsyncWrite + Unpin),
    data: &[u8],
    so_far: &mut Written,
) -> std::io::Result<()> {
    stream.write_all(data).await?;
    stream.flush().await?;
    so_far.bytes += data.len() as u64;
    so_far.first.get_or_insert_with(Instant::now);
    Ok(())
}

async fn send_sizes(input: ProgramInput, mut resizes: Signal) {
    loop {
        // At first too: the window may have changed since the program was asked for.
        if let Some(size) = terminal::size()
            && !input.send(Input::Resize(size)).await
        {
            return;
        }
        if resizes.recv().await.is_none() {
            return;
        }
    }
}
