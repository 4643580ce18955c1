//! A program in a guest at the user's terminal: its output, the user's input, signals and window size, until it ends.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use imp_embedded::client::{Attached, AttachedInput, Event};
use imp_protocol::guest::ExecInput;
use imp_protocol::process::{Exit, Input, Output, Session};
use imp_runtime::status::VmStatus;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::output;
use crate::terminal::{self, DetachFilter, DetachKeys, RawMode, Typed};

/// Largest piece of input sent at once.
const CHUNK: usize = 32 << 10;
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
            Self::Exec(session) => Ok(Event::Output(session.next().await?)),
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
    pub(crate) detach_keys: DetachKeys,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stdin {
    Sent,
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
    /// They end this command.
    Kept,
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
    Interrupted(u8),
    /// The user asked often enough.
    Impatient(u8),
    /// Nobody reads the output any more.
    BrokenPipe,
}

/// What happens beside the program's output.
enum Aside {
    Detached,
    Signal(SignalKind),
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
    written: &mut Written,
) -> anyhow::Result<End> {
    let raw = match (wiring.terminal, wiring.stdin) {
        (Terminal::Own, Stdin::Sent) if terminal::is_terminal(std::io::stdin()) => {
            Some(RawMode::enter().context("cannot set the terminal to raw mode")?)
        }
        _ => None,
    };
    let input = program.input();
    let (asides, aside) = mpsc::channel(4);
    let mut tasks = tokio::task::JoinSet::new();
    if wiring.stdin == Stdin::Sent {
        let filter = raw.is_some().then(|| DetachFilter::new(wiring.detach_keys.clone()));
        tasks.spawn(send_stdin(input.clone(), filter, asides.clone()));
    }
    if wiring.terminal == Terminal::Own {
        let resizes = signal(SignalKind::window_change()).context("cannot receive signals")?;
        tasks.spawn(send_sizes(input.clone(), resizes));
    }
    if wiring.signals == Signals::PassedOn {
        tasks.spawn(catch_signals(asides, all_signals()?));
    }
    pump(program, input, aside, written).await
}

async fn pump(
    program: &mut Program,
    input: ProgramInput,
    mut asides: mpsc::Receiver<Aside>,
    so_far: &mut Written,
) -> anyhow::Result<End> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let mut started = so_far.bytes > 0;
    let mut requests_to_end = 0;
    loop {
        let event = tokio::select! {
            event = program.next() => event?,
            Some(aside) = asides.recv() => match aside {
                Aside::Detached => return Ok(End::Detached),
                Aside::Signal(kind) => {
                    let number = u8::try_from(kind.as_raw_value()).unwrap_or(0);
                    if !started {
                        return Ok(End::Interrupted(number));
                    }
                    if kind == SignalKind::interrupt() || kind == SignalKind::terminate() {
                        requests_to_end += 1;
                        if requests_to_end == IMPATIENCE {
                            return Ok(End::Impatient(number));
                        }
                    }
                    input.send(Input::Signal(number.to_string())).await;
                    continue;
                }
            },
        };
        let written = match event {
            Event::Failed(status) => return Ok(End::Failed(status)),
            Event::Output(Output::Exited(exit)) => return Ok(End::Exited(exit)),
            Event::Output(Output::Started) => {
                started = true;
                continue;
            }
            Event::Output(Output::Dropped(bytes)) => {
                so_far.bytes += bytes;
                output::warn(&format!("{bytes} bytes of output are missing here"));
                continue;
            }
            Event::Output(Output::Stdout(data)) => write(&mut stdout, &data, so_far).await,
            Event::Output(Output::Stderr(data)) => write(&mut stderr, &data, so_far).await,
        };
        started = true;
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                // What the program would get if it wrote to the pipe itself.
                input.send(Input::Signal("SIGPIPE".to_owned())).await;
                // One that does not mind goes on without its reader.
                let _ = tokio::time::timeout(LAST_OUTPUT, until_exit(program)).await;
                return Ok(End::BrokenPipe);
            }
            Err(error) => return Err(error).context("cannot write the program's output"),
        }
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
    stream: &mut (impl AsyncWrite + Unpin),
    data: &[u8],
    so_far: &mut Written,
) -> std::io::Result<()> {
    stream.write_all(data).await?;
    stream.flush().await?;
    so_far.bytes += data.len() as u64;
    so_far.first.get_or_insert_with(Instant::now);
    Ok(())
}

/// Sends what the user types or pipes in, then the end of it.
async fn send_stdin(input: ProgramInput, mut filter: Option<DetachFilter>, asides: mpsc::Sender<Aside>) {
    let (pieces, mut piece) = mpsc::channel::<Bytes>(4);
    // A thread of its own: a read of a terminal cannot be called off.
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let bytes = Bytes::copy_from_slice(buffer.get(..read).unwrap_or_default());
            if pieces.blocking_send(bytes).is_err() {
                return;
            }
        }
    });
    while let Some(bytes) = piece.recv().await {
        let (bytes, detached) = match &mut filter {
            None => (bytes, false),
            Some(filter) => match filter.typed(&bytes) {
                Typed::Pass(bytes) => (bytes.into(), false),
                Typed::Detach(bytes) => (bytes.into(), true),
            },
        };
        if !bytes.is_empty() && !input.send(Input::Stdin(bytes)).await {
            return;
        }
        if detached {
            let _ = asides.send(Aside::Detached).await;
            return;
        }
    }
    input.send(Input::CloseStdin).await;
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

/// Signals that a program may want to have; the rest keep their meaning for this command.
fn all_signals() -> anyhow::Result<Vec<(SignalKind, Signal)>> {
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::quit(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ];
    let catch = |kind| Ok((kind, signal(kind).context("cannot receive signals")?));
    kinds.into_iter().map(catch).collect()
}

async fn catch_signals(asides: mpsc::Sender<Aside>, signals: Vec<(SignalKind, Signal)>) {
    let catch = |(kind, mut signal): (SignalKind, Signal)| {
        let asides = asides.clone();
        async move {
            while signal.recv().await.is_some() {
                if asides.send(Aside::Signal(kind)).await.is_err() {
                    return;
                }
            }
        }
    };
    let mut all: FuturesUnordered<_> = signals.into_iter().map(catch).collect();
    while all.next().await.is_some() {}
}
