//! Programs in a node: what to run, and one that runs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use imp_testkit_node::wire::{CHUNK, End, Message, Program};

use super::Shared;
use super::channel::Conversation;
use super::error::Error;

/// Output of one program that the test holds at most.
const MOST_OUTPUT: usize = 256 << 20;
/// A program that was killed reports its end at once, if the node lives.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// A command line and what belongs to it. By default: no input, directory `/`, `PATH` and `HOME` only, one minute.
#[derive(Debug, Clone)]
pub struct Command {
    program: Program,
    input: Vec<u8>,
    deadline: Duration,
}

impl Command {
    /// The program is looked for in `PATH` unless it has a slash.
    #[must_use]
    pub fn new(program: impl Into<String>) -> Self {
        let environment = BTreeMap::from([
            ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
            ("HOME".to_owned(), "/root".to_owned()),
        ]);
        let program = Program { arguments: vec![program.into()], environment, directory: PathBuf::from("/") };
        Self { program, input: Vec::new(), deadline: Duration::from_secs(60) }
    }

    /// A script for `/bin/sh`.
    #[must_use]
    pub fn shell(script: &str) -> Self {
        Self::new("/bin/sh").arguments(["-ec", script])
    }

    #[must_use]
    pub fn arguments<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.program.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.program.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.program.directory = directory.into();
        self
    }

    #[must_use]
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.input = input.into();
        self
    }

    /// Counts from the start of the program. What has not ended by then is killed with all that it started.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.program.arguments.join(" "))
    }
}

/// How a program ended and all that it wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// None while it runs.
    pub end: Option<End>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Output {
    /// The exit code; none for a program that a signal ended.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self.end {
            Some(End::Exited(code)) => Some(code),
            Some(End::Signalled(_) | End::NotStarted(_)) | None => None,
        }
    }

    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            Some(End::Exited(code)) => writeln!(f, "ended with exit code {code}")?,
            Some(End::Signalled(signal)) => writeln!(f, "was ended by signal {signal}")?,
            Some(End::NotStarted(reason)) => writeln!(f, "did not start: {reason}")?,
            None => writeln!(f, "was running")?,
        }
        for (name, bytes) in [("output", &self.stdout), ("errors", &self.stderr)] {
            if !bytes.is_empty() {
                let tail = bytes.get(bytes.len().saturating_sub(4000)..).unwrap_or_default();
                writeln!(f, "its last {name}:\n{}", String::from_utf8_lossy(tail).trim_end())?;
            }
        }
        Ok(())
    }
}

/// A piece of what a program wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Output(Vec<u8>),
    Errors(Vec<u8>),
}

/// A running program. Dropping it kills the program and all that it started; what a program that ended by itself left
/// running stays.
#[derive(Debug)]
pub struct Process {
    node: Arc<Shared>,
    conversation: Conversation,
    command: Command,
    until: Instant,
    output: Output,
}

impl Process {
    pub(super) fn start(node: Arc<Shared>, command: Command) -> Result<Self, Error> {
        let until = Instant::now() + command.deadline;
        let conversation = node.channel.open();
        node.send(conversation.number, Message::Run(command.program.clone()))?;
        let this = Self { node, conversation, command, until, output: Output::default() };
        this.feed();
        Ok(this)
    }

    /// Sends the command's input from a thread of its own, because the program may write before it reads.
    fn feed(&self) {
        let (node, number) = (Arc::clone(&self.node), self.conversation.number);
        let (window, input, until) =
            (Arc::clone(&self.conversation.window), self.command.input.clone(), self.until);
        let send = move || {
            for chunk in input.chunks(CHUNK) {
                // A program that ended without reading all of it is no error.
                if !window.reserve(chunk.len(), until)
                    || node.send(number, Message::Input(chunk.to_vec())).is_err()
                {
                    return;
                }
            }
            let _ = node.send(number, Message::EndOfInput);
        };
        if self.command.input.is_empty() {
            send();
        } else {
            thread::spawn(send);
        }
    }

    /// The next piece of output as it comes; none after the program's end.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, Error> {
        while self.output.end.is_none() {
            match self.receive(self.until) {
                Ok(Some(piece)) => {
                    self.check_size()?;
                    return Ok(Some(piece));
                }
                Ok(None) => {}
                Err(RecvTimeoutError::Timeout) => return Err(self.overdue()),
                Err(RecvTimeoutError::Disconnected) => return Err(self.node_ended()),
            }
        }
        match &self.output.end {
            Some(End::NotStarted(reason)) => {
                Err(Error::NotStarted { command: self.command.to_string(), reason: reason.clone() })
            }
            Some(End::Exited(_) | End::Signalled(_)) | None => Ok(None),
        }
    }

    /// Takes one message into account, and returns it if it is output.
    fn receive(&mut self, until: Instant) -> Result<Option<Piece>, RecvTimeoutError> {
        let left = until.saturating_duration_since(Instant::now());
        match self.conversation.messages.recv_timeout(left)? {
            Message::Output(bytes) => {
                self.output.stdout.extend_from_slice(&bytes);
                return Ok(Some(Piece::Output(bytes)));
            }
            Message::Errors(bytes) => {
                self.output.stderr.extend_from_slice(&bytes);
                return Ok(Some(Piece::Errors(bytes)));
            }
            Message::End(end) => self.output.end = Some(end),
            // The channel keeps these for itself, and a node sends no others.
            Message::Ready | Message::Took(_) => {}
            Message::Run(_) | Message::Input(_) | Message::EndOfInput | Message::Kill => {}
        }
        Ok(None)
    }

    fn check_size(&mut self) -> Result<(), Error> {
        if self.output.stdout.len() + self.output.stderr.len() <= MOST_OUTPUT {
            return Ok(());
        }
        self.kill();
        Err(Error::TooMuchOutput { command: self.command.to_string(), limit: MOST_OUTPUT })
    }

    fn node_ended(&self) -> Error {
        Error::Ended { logs: self.node.save_logs() }
    }

    /// Kills the program; a node in which even that does not work is not used any more.
    fn overdue(&mut self) -> Error {
        self.kill();
        let until = Instant::now() + KILL_DEADLINE;
        while self.output.end.is_none() {
            if self.receive(until).is_err() {
                self.node.channel.hang_up();
                break;
            }
        }
        Error::Deadline {
            command: self.command.to_string(),
            deadline: self.command.deadline,
            output: Box::new(std::mem::take(&mut self.output)),
            logs: self.node.save_logs(),
        }
    }

    /// Reads until the program has written `wanted` to one of its outputs. A program that is late runs on.
    pub fn wait_for(&mut self, wanted: &str, deadline: Duration) -> Result<(), Error> {
        let until = (Instant::now() + deadline).min(self.until);
        let has = |bytes: &[u8]| bytes.windows(wanted.len()).any(|part| part == wanted.as_bytes());
        while !has(&self.output.stdout) && !has(&self.output.stderr) {
            let received = match self.output.end {
                None => self.receive(until),
                Some(_) => Err(RecvTimeoutError::Timeout),
            };
            match received {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.node_ended()),
                Err(RecvTimeoutError::Timeout) => {
                    let (command, output) = (self.command.to_string(), Box::new(self.output.clone()));
                    return Err(Error::NotSaid { command, wanted: wanted.to_owned(), deadline, output });
                }
            }
        }
        Ok(())
    }

    /// Waits for the program's end.
    pub fn wait(mut self) -> Result<Output, Error> {
        while self.next_piece()?.is_some() {}
        Ok(std::mem::take(&mut self.output))
    }

    /// Ends the program and all that it started.
    pub fn kill(&self) {
        // A node that takes no messages has ended, and its programs with it.
        let _ = self.node.send(self.conversation.number, Message::Kill);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.output.end.is_none() {
            self.kill();
        }
        self.node.channel.forget(self.conversation.number);
    }
}
