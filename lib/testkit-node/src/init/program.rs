//! One program of the test: started in a cgroup of its own, its streams passed on, its end reported after its output.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::Receiver;
use std::thread;

use imp_testkit_node::wire::{CHUNK, End, Message, Program};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open, setsid};

use super::serve::Answers;

/// The cgroup above those of the programs.
pub(super) const GROUPS: &str = "/sys/fs/cgroup/programs";

pub(super) enum Input {
    Bytes(Vec<u8>),
    End,
}

fn group(conversation: u32) -> PathBuf {
    PathBuf::from(format!("{GROUPS}/{conversation}"))
}

/// Runs the program to its end, which is always reported.
pub(super) fn run(program: &Program, conversation: u32, input: Receiver<Input>, answers: &Answers) {
    let end = match start(program, conversation) {
        Ok(mut child) => {
            feed(&mut child, conversation, input, answers.clone());
            pass_output(&mut child, conversation, answers)
                .unwrap_or_else(|error| End::NotStarted(error.to_string()))
        }
        Err(error) => End::NotStarted(error.to_string()),
    };
    // One that left processes behind cannot be removed: they are the test's wish.
    let _ = fs::remove_dir(group(conversation));
    // When the channel has gone there is nobody to tell.
    let _ = answers.send(conversation, Message::End(end));
}

/// Ends the program and all that it started.
pub(super) fn kill(conversation: u32) {
    // No cgroup, no process.
    let _ = fs::write(group(conversation).join("cgroup.kill"), "1");
}

fn start(program: &Program, conversation: u32) -> io::Result<Child> {
    if !program.directory.is_dir() {
        return Err(io::Error::other(format!("{} is no directory in the node", program.directory.display())));
    }
    let group = group(conversation);
    fs::create_dir(&group)?;
    Command::new("/proc/self/exe")
        .arg(super::ENTER)
        .arg(group.join("cgroup.procs"))
        .args(&program.arguments)
        .env_clear()
        .envs(&program.environment)
        .current_dir(&program.directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// The step between the server and a program: joins the cgroup before the program can start anything.
pub(crate) fn enter(cgroup: &str, program: &str, arguments: &[&str]) -> ExitCode {
    if let Err(error) = fs::write(cgroup, "0") {
        eprintln!("imp-node: {cgroup}: {error}");
        return ExitCode::from(125);
    }
    // Fails only for the leader of a process group, which is in no terminal's session either.
    let _ = setsid();
    let error = Command::new(program).args(arguments).exec();
    eprintln!("imp-node: {program}: {error}");
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// A thread of its own, because a program may never read.
fn feed(child: &mut Child, conversation: u32, input: Receiver<Input>, answers: Answers) {
    let Some(mut stdin) = child.stdin.take() else { return };
    thread::spawn(move || {
        while let Ok(Input::Bytes(bytes)) = input.recv() {
            if stdin.write_all(&bytes).is_err() {
                return;
            }
            let count = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            if answers.send(conversation, Message::Took(count)).is_err() {
                return;
            }
        }
    });
}

/// Passes output on until the program has ended and all that it wrote before is read. Programs that it left behind may
/// hold the pipes open for ever, so their end is not waited for.
fn pass_output(child: &mut Child, conversation: u32, answers: &Answers) -> io::Result<End> {
    let ended = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let mut streams = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        streams.push(Stream { pipe: File::from(std::os::fd::OwnedFd::from(stdout)), wrap: Message::Output });
    }
    if let Some(stderr) = child.stderr.take() {
        streams.push(Stream { pipe: File::from(std::os::fd::OwnedFd::from(stderr)), wrap: Message::Errors });
    }
    for stream in &streams {
        let flags = rustix::fs::fcntl_getfl(&stream.pipe)?;
        rustix::fs::fcntl_setfl(&stream.pipe, flags | OFlags::NONBLOCK)?;
    }
    loop {
        let mut waiting = vec![PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN)];
        waiting.extend(
            streams.iter().map(|stream| PollFd::from_borrowed_fd(stream.pipe.as_fd(), PollFlags::IN)),
        );
        match poll(&mut waiting, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Looked at before the pipes are read: what was written before the end is in them.
        let over = waiting.first().is_some_and(|ended| !ended.revents().is_empty());
        drop(waiting);
        let mut open = Vec::new();
        for mut stream in streams {
            if stream.pass_available(conversation, answers)? {
                open.push(stream);
            }
        }
        streams = open;
        if over {
            let status = child.wait()?;
            return Ok(match (status.code(), status.signal()) {
                (Some(code), _) => End::Exited(code),
                (None, signal) => End::Signalled(signal.unwrap_or_default()),
            });
        }
    }
}

struct Stream {
    pipe: File,
    wrap: fn(Vec<u8>) -> Message,
}

impl Stream {
    /// Passes on what is in the pipe; false when no writer is left.
    fn pass_available(&mut self, conversation: u32, answers: &Answers) -> io::Result<bool> {
        let mut buffer = vec![0; CHUNK];
        loop {
            match self.pipe.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                    answers.send(conversation, (self.wrap)(bytes))?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
