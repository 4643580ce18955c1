//! Starts a process: its pipes or its terminal, its cgroup, its working directory.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use imp_sys::child::{self, Child, ControllingTerminal, Spawn, Step};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::spec::{Launch, ProcessId, Size, Stdin};
use super::tree::{self, Forest, Tree};

/// Not /dev/ptmx: whoever removes that file in the guest would take terminals away; this one cannot be removed.
const MULTIPLEXER: &str = "/dev/pts/ptmx";
/// Tries of a program file that somebody still writes.
const BUSY_TRIES: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no pipe or terminal could be made")]
    Descriptors(#[source] io::Error),
    #[error("the working directory {path} could not be made")]
    Directory { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Tree(#[from] tree::Error),
    #[error(transparent)]
    Spawn(#[from] child::Error),
}

/// A process that runs, with the agent's ends of its input and output.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) tree: Tree,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    /// Absent with a terminal.
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) terminal: Option<OwnedFd>,
}

/// The agent's and the process's ends.
struct Ends {
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
    theirs: Theirs,
}

enum Theirs {
    Terminal(OwnedFd),
    Pipes { stdin: OwnedFd, stdout: OwnedFd, stderr: OwnedFd },
}

/// Blocks until the program runs. `null` is /dev/null, opened before anybody could remove it.
pub(crate) fn start(id: &ProcessId, launch: &Launch, forest: &Forest, null: &File) -> Result<Started, Error> {
    let ends = match launch.terminal {
        Some(size) => terminal(size).map_err(Error::Descriptors)?,
        None => pipes(launch.stdin, null).map_err(Error::Descriptors)?,
    };
    make_directory(launch)?;
    let planted = forest.plant(id, &launch.limits)?;
    let (stdin, stdout, stderr, terminal) = match &ends.theirs {
        Theirs::Terminal(slave) => (slave, slave, slave, ControllingTerminal::Stdin),
        Theirs::Pipes { stdin, stdout, stderr } => (stdin, stdout, stderr, ControllingTerminal::None),
    };
    let request = Spawn {
        programs: &launch.programs,
        arguments: &launch.arguments,
        environment: &launch.environment,
        directory: &launch.directory,
        stdin: stdin.as_fd(),
        stdout: stdout.as_fd(),
        stderr: stderr.as_fd(),
        terminal,
        uid: launch.account.uid,
        gid: launch.account.gid,
        groups: &launch.account.groups,
        open_files: launch.limits.open_files,
        cgroup: planted.as_ref().map(|(_, directory)| directory.as_fd()),
    };
    match spawn_once_written(&request) {
        Ok(child) => {
            let tree = planted.map_or(Tree::Session(child.pid), |(path, _)| Tree::Cgroup(path));
            let Ends { stdin, stdout, stderr, terminal, .. } = ends;
            Ok(Started { child, tree, stdin, stdout, stderr, terminal })
        }
        Err(error) => {
            if let Some((path, _)) = planted {
                let _ = fs::remove_dir(path);
            }
            Err(error.into())
        }
    }
}

/// A program that was copied in a moment ago may still be open for writing in a process that is about to execute
/// something else.
fn spawn_once_written(request: &Spawn<'_>) -> Result<Child, child::Error> {
    let mut pause = Duration::from_millis(2);
    for _ in 1..BUSY_TRIES {
        match child::spawn(request) {
            Err(child::Error::Child { step: Step::Program, source })
                if source.kind() == io::ErrorKind::ExecutableFileBusy =>
            {
                std::thread::sleep(pause);
                pause *= 4;
            }
            other => return other,
        }
    }
    child::spawn(request)
}

fn terminal(size: Size) -> io::Result<Ends> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let master = rustix::fs::open(MULTIPLEXER, flags, Mode::empty())?;
    unlockpt(&master)?;
    let slave = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    resize(&master, size)?;
    Ok(Ends {
        stdin: Some(master.try_clone()?),
        stdout: master.try_clone()?,
        stderr: None,
        terminal: Some(master),
        theirs: Theirs::Terminal(slave),
    })
}

pub(crate) fn resize(terminal: impl AsFd, size: Size) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(terminal, size)?)
}

fn pipes(stdin: Stdin, null: &File) -> io::Result<Ends> {
    let (ours_in, theirs_in) = match stdin {
        Stdin::Connected => {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&writer, true)?;
            (Some(writer), reader)
        }
        Stdin::Null => (None, null.as_fd().try_clone_to_owned()?),
    };
    let output = || -> io::Result<(OwnedFd, OwnedFd)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        Ok((reader, writer))
    };
    let (stdout, theirs_out) = output()?;
    let (stderr, theirs_err) = output()?;
    Ok(Ends {
        stdin: ours_in,
        stdout,
        stderr: Some(stderr),
        terminal: None,
        theirs: Theirs::Pipes { stdin: theirs_in, stdout: theirs_out, stderr: theirs_err },
    })
}

/// Makes the working directory when it is missing; the last part belongs to the process's user, as container engines do.
fn make_directory(launch: &Launch) -> Result<(), Error> {
    let path = Path::new(std::ffi::OsStr::from_bytes(launch.directory.to_bytes()));
    if path.is_dir() {
        return Ok(());
    }
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    let owned = made.and_then(|()| chown(path, Some(launch.account.uid), Some(launch.account.gid)));
    owned.map_err(|source| Error::Directory { path: path.to_owned(), source })
}
