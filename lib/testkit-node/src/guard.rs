//! The guard of one node: starts its processes on the host, ends them when the test is gone, and removes their folder.
//!
//! It is PID 1 of a process namespace of its own, so that when it ends, for whatever reason, the kernel ends the others.
//! Its standard input is the node's channel: the other end is held by the test alone, and a hang-up means that the test
//! has dropped the node or has died.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};
use rustix::net::Shutdown;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// Files of a node's folder.
pub const PLAN: &str = "plan.json";
pub const CONSOLE: &str = "console.log";
/// What went wrong or what the programs on the host said, beside the console.
pub const LOGS: [&str; 4] = [CONSOLE, QEMU_LOG, VIRTIOFSD_LOG, GUARD_LOG];
pub const GUARD_LOG: &str = "guard.log";
const QEMU_LOG: &str = "qemu.log";
const VIRTIOFSD_LOG: &str = "virtiofsd.log";
/// Where the node's view of the host is put together.
const TREE: &str = "tree";
/// Socket between QEMU and virtiofsd.
pub const SHARE_SOCKET: &str = "share.sock";

/// What the guard is to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Directories and files of the host, absolute and without symbolic links, that the node sees under the same path.
    pub shares: Vec<PathBuf>,
    /// Symbolic links at the top of the node's view, as `/bin`: path and target.
    pub links: Vec<(PathBuf, PathBuf)>,
    pub virtiofsd: PathBuf,
    /// QEMU and its arguments; the channel is its standard input.
    pub qemu: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the plan in {path} could not be read")]
    Plan { path: PathBuf, source: io::Error },
    #[error("{path} could not be made visible to the node")]
    Share { path: PathBuf, source: io::Error },
    #[error("{path} could not be made")]
    Make { path: PathBuf, source: io::Error },
    #[error("{program} could not be started")]
    Start { program: PathBuf, source: io::Error },
    #[error("the guard could not watch over the node's processes")]
    Watch(#[source] io::Error),
}

/// Runs the node whose plan is in `folder` until the channel hangs up.
pub fn run(folder: &Path) -> Result<(), Error> {
    let result = start(folder).and_then(|mut processes| {
        let result = processes.watch();
        processes.end();
        result
    });
    // Whoever waits for the node hears of its end; the folder stays until the logs have been read.
    let _ = rustix::net::shutdown(rustix::stdio::stdin(), Shutdown::Write);
    if let Err(error) = &result {
        eprintln!("{}", chain(error));
    }
    let hung_up = wait_for_hang_up();
    remove(folder);
    result.and(hung_up)
}

/// Removes the folder, unless directories of the host could still be mounted in it.
fn remove(folder: &Path) {
    match unmount(folder.join(TREE), UnmountFlags::DETACH) {
        // It was never a mount, or never made.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {
            let _ = fs::remove_dir_all(folder);
        }
        Err(error) => eprintln!("{} stays mounted: {error}", folder.display()),
    }
}

fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

struct Processes {
    qemu: Child,
    virtiofsd: Child,
}

fn start(folder: &Path) -> Result<Processes, Error> {
    let path = folder.join(PLAN);
    let plan = fs::read(&path).map_err(|source| Error::Plan { path: path.clone(), source })?;
    let plan: Plan =
        serde_json::from_slice(&plan).map_err(|error| Error::Plan { path, source: error.into() })?;
    let tree = folder.join(TREE);
    build_tree(&tree, &plan)?;

    let socket = folder.join(SHARE_SOCKET);
    let listener =
        UnixListener::bind(&socket).map_err(|source| Error::Make { path: socket.clone(), source })?;
    let listener = inheritable(listener.into()).map_err(|source| Error::Make { path: socket, source })?;
    let mut virtiofsd = Command::new(&plan.virtiofsd);
    virtiofsd.arg(format!("--fd={}", listener.as_raw_fd()));
    virtiofsd.arg("-o").arg({
        let mut option = std::ffi::OsString::from("source=");
        option.push(&tree);
        option
    });
    // Nothing on the host changes under a node: what was read once needs no second look.
    virtiofsd.args(["-o", "cache=always", "-o", "sandbox=chroot", "-o", "log_level=warn"]);
    virtiofsd.stdin(Stdio::null());
    let virtiofsd = spawn(virtiofsd, &folder.join(VIRTIOFSD_LOG))?;
    drop(listener);

    let (program, arguments) = plan.qemu.split_first().ok_or_else(|| Error::Plan {
        path: folder.join(PLAN),
        source: io::Error::other("it names no QEMU"),
    })?;
    let mut qemu = Command::new(program);
    qemu.args(arguments).stdin(Stdio::inherit());
    Ok(Processes { qemu: spawn(qemu, &folder.join(QEMU_LOG))?, virtiofsd })
}

fn inheritable(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    rustix::io::fcntl_setfd(&descriptor, FdFlags::empty())?;
    Ok(descriptor)
}

fn spawn(mut command: Command, log: &Path) -> Result<Child, Error> {
    let make = |source| Error::Make { path: log.to_owned(), source };
    let file = File::create(log).map_err(make)?;
    command.stdout(file.try_clone().map_err(make)?).stderr(file);
    command.spawn().map_err(|source| Error::Start { program: command.get_program().into(), source })
}

/// A file system in which nothing is but what the plan names, read-only.
fn build_tree(tree: &Path, plan: &Plan) -> Result<(), Error> {
    let make = |path: &Path, source: io::Error| Error::Make { path: path.to_owned(), source };
    fs::create_dir_all(tree).map_err(|source| make(tree, source))?;
    mount("tmpfs", tree, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755")
        .map_err(|error| make(tree, error.into()))?;
    for share in &plan.shares {
        let place = below(tree, share);
        bind(share, &place).map_err(|source| Error::Share { path: share.clone(), source })?;
    }
    for (link, target) in &plan.links {
        let place = below(tree, link);
        symlink(target, &place).map_err(|source| make(&place, source))?;
    }
    Ok(())
}

fn below(tree: &Path, path: &Path) -> PathBuf {
    tree.join(path.strip_prefix("/").unwrap_or(path))
}

fn bind(share: &Path, place: &Path) -> io::Result<()> {
    if fs::metadata(share)?.is_dir() {
        fs::create_dir_all(place)?;
    } else {
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        File::create(place)?;
    }
    mount_bind(share, place)?;
    mount_remount(place, MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID, c"")?;
    Ok(())
}

impl Processes {
    /// Waits until the channel hangs up or one of the processes ends.
    fn watch(&self) -> Result<(), Error> {
        let watch = |child: &Child| {
            pidfd_open(Pid::from_child(child), PidfdFlags::empty())
                .map_err(|error| Error::Watch(error.into()))
        };
        let (qemu, virtiofsd) = (watch(&self.qemu)?, watch(&self.virtiofsd)?);
        wait(&mut [
            PollFd::from_borrowed_fd(rustix::stdio::stdin(), PollFlags::empty()),
            PollFd::from_borrowed_fd(qemu.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(virtiofsd.as_fd(), PollFlags::IN),
        ])
    }

    fn end(&mut self) {
        for (name, child) in [("qemu", &mut self.qemu), ("virtiofsd", &mut self.virtiofsd)] {
            // One that has ended already cannot be killed, which is as good.
            let _ = child.kill();
            if let Ok(status) = child.wait() {
                eprintln!("{name}: {status}");
            }
        }
    }
}

fn wait_for_hang_up() -> Result<(), Error> {
    wait(&mut [PollFd::from_borrowed_fd(rustix::stdio::stdin(), PollFlags::empty())])
}

fn wait(descriptors: &mut [PollFd<'_>]) -> Result<(), Error> {
    loop {
        match poll(descriptors, None) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::Watch(error.into())),
        }
    }
}
