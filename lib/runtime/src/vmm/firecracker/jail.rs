//! The jailer, which starts Firecracker as a user of its own in a root directory of its own, where it sees nothing but its
//! machine's files, and no other process: docs/jailer.md of Firecracker.
//!
//! The jailer ends when Firecracker runs. Its child becomes one of this process, which therefore has to be the one that
//! orphans are given to.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use imp_sys::spawn::{Program, spawn_detached};
use rustix::mount::UnmountFlags;
use rustix::process::Pid;

use super::mark;
use super::room::{API, LOG, METRICS, Room};
use crate::console;
use crate::layout::VmLayout;
use crate::process::{self, Process};
use crate::status::VmmEnd;
use crate::vmm::{BootConfig, inside, namespace};

/// Users that machines run as, one for each: far from those of people, services and containers.
pub(crate) const USERS: std::ops::Range<u32> = 1_879_048_192..1_879_113_728;
/// The jailer copies a program of three megabytes and makes a few directories.
const STARTS: Duration = Duration::from_secs(20);
/// A process that becomes another program has not all of its words for a moment.
const BECOMES: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot become the process that orphans are given to")]
    Subreaper(#[source] io::Error),
    #[error("cannot start {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot hold the process that the jailer started")]
    Hold(#[source] process::Error),
    #[error("the jailer did not start Firecracker within {} s", STARTS.as_secs())]
    Late,
    #[error("the jailer ended ({end}) without having started Firecracker: {said}")]
    NotStarted { end: VmmEnd, said: String },
    #[error(
        "the disk that holds {} is full, and the jail takes {} KiB of it; make room there (imp prune) and try again",
        path.display(), needed >> 10
    )]
    Full { path: PathBuf, needed: u64 },
    #[error("cannot prepare {} for the jail", path.display())]
    Prepare {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Where the root directory is that the jailer makes for this program and VM.
pub(super) fn root(base: &Path, program: &Path, id: &str) -> PathBuf {
    let name = program.file_name().unwrap_or(OsStr::new("firecracker"));
    base.join(name).join(mark(id)).join("root")
}

/// The root directory of a VM that has one, whatever program was put there.
pub(super) fn found(vm: &VmLayout) -> Option<PathBuf> {
    let only = |directory: &Path| Some(fs::read_dir(directory).ok()?.next()?.ok()?.path());
    Some(only(&only(&vm.jail())?)?.join("root"))
}

/// What Firecracker calls itself in its jail.
pub(super) fn name_inside(program: &Path) -> OsString {
    Path::new("/").join(program.file_name().unwrap_or(OsStr::new("firecracker"))).into()
}

/// Makes a file of the host visible in the jail, for its user to read, and to write if it is his.
pub(super) fn bring(file: &Path, to: &Path, writer: Option<u32>) -> Result<(), Error> {
    let failed = |source| Error::Prepare { path: file.to_owned(), source };
    match writer {
        Some(user) => chown(file, Some(user), Some(user)).map_err(failed)?,
        // The directory above is for root alone, whatever the file's own mode is.
        None => {
            let mode = fs::metadata(file).map_err(failed)?.permissions().mode();
            if mode & 0o444 != 0o444 {
                fs::set_permissions(file, fs::Permissions::from_mode(mode | 0o444)).map_err(failed)?;
            }
        }
    }
    let place = |source| Error::Prepare { path: to.to_owned(), source };
    File::create_new(to).map_err(place)?;
    rustix::mount::mount_bind(file, to).map_err(|error| place(error.into()))?;
    if writer.is_none() {
        use rustix::mount::MountFlags;
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount_remount(to, flags, c"").map_err(|error| place(error.into()))?;
    }
    Ok(())
}

/// Gives the user what was made for him.
pub(super) fn give(path: &Path, user: u32) -> Result<(), Error> {
    chown(path, Some(user), Some(user)).map_err(|source| Error::Prepare { path: path.to_owned(), source })
}

/// Removes the jail at `base` with all that was brought into it. Nothing of the VM may run any more.
pub(crate) fn remove(base: &Path) -> io::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let below = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    for mount in below.filter(|mount| mount.starts_with(base)) {
        rustix::mount::unmount(&mount, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    match fs::remove_dir_all(base) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Has the jailer start the process, which waits for orders.
pub(super) fn spawn(
    jailer: &Path,
    program: &Path,
    user: u32,
    boot: &BootConfig,
    room: &Room,
    vm: &VmLayout,
    streams: &Streams,
) -> Result<Process, crate::vmm::Error> {
    let failed = crate::vmm::Error::Jail;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| failed(Error::Subreaper(error.into())))?;
    let arguments = arguments(program, user, &boot.id, &vm.jail());
    let start = || {
        spawn_detached(&Program {
            path: jailer,
            arguments: &arguments,
            environment: &[],
            directory: Some(Path::new("/")),
            stdin: streams.null.as_fd(),
            stdout: streams.console.as_fd(),
            stderr: streams.log.as_fd(),
            inherited: &[],
        })
    };
    let pid = inside(namespace(boot), start)?
        .map_err(|source| failed(Error::Spawn { program: jailer.to_owned(), source }))?;
    let jailer = Process::of_child(pid).map_err(|error| failed(Error::Hold(error)))?;
    let deadline = Instant::now() + STARTS;
    while jailer.is_alive() {
        if Instant::now() > deadline {
            jailer.kill();
            return Err(failed(Error::Late));
        }
        std::thread::sleep(LOOK);
    }
    let end = jailer.reap();
    let name = name_inside(program);
    let pid_file = room
        .path()
        .join(format!("{}.pid", Path::new(&name).strip_prefix("/").unwrap_or(Path::new("")).display()));
    let process = started(&pid_file, &boot.id).map_err(failed)?;
    // A jailer that finds no room cannot say so, if its log is to be on the same disk.
    process.ok_or_else(|| {
        failed(full(program, room).unwrap_or(Error::NotStarted { end, said: streams.said(vm) }))
    })
}

/// Whether the program, of which the jailer makes a copy, has no room in the jail.
fn full(program: &Path, room: &Room) -> Option<Error> {
    let needed = fs::metadata(program).ok()?.len();
    let disk = rustix::fs::statvfs(room.path()).ok()?;
    let copied = fs::metadata(room.path().join(program.file_name()?)).map_or(0, |copy| copy.len());
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    (copied < needed && free < needed).then(|| Error::Full { path: room.path().to_owned(), needed })
}

/// What the process that is to be reads and writes.
pub(super) struct Streams {
    pub null: File,
    pub console: std::os::fd::OwnedFd,
    pub log: File,
}

impl Streams {
    /// The last that was said on either, by a process that has ended.
    fn said(&self, vm: &VmLayout) -> String {
        let mut output = [0; 4096];
        // Nothing there is an error, too: it does not block.
        let count = rustix::io::read(&self.console, &mut output).unwrap_or_default();
        let output = String::from_utf8_lossy(output.get(..count).unwrap_or_default());
        let mut lines: Vec<String> = output.lines().map(str::to_owned).collect();
        lines.extend(console::last_lines(&vm.vmm_log(), &vm.earlier_vmm_log(), 2));
        lines.get(lines.len().saturating_sub(3)..).unwrap_or_default().join("; ")
    }
}

fn arguments(program: &Path, user: u32, id: &str, base: &Path) -> Vec<OsString> {
    let (user, mark) = (OsString::from(user.to_string()), OsString::from(mark(id)));
    let mut arguments: Vec<OsString> = Vec::new();
    let mut pair = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
    pair("--id", mark);
    pair("--exec-file", program.into());
    pair("--uid", user.clone());
    pair("--gid", user);
    pair("--chroot-base-dir", base.into());
    let inside = ["--api-sock", API, "--log-path", LOG, "--level", "Warning", "--metrics-path", METRICS];
    arguments.extend(["--new-pid-ns", "--"].into_iter().chain(inside).map(OsString::from));
    arguments
}

/// The process of which the jailer wrote down the number. The file lies in the jail: what it names is believed only if
/// it is this VM's.
fn started(pid_file: &Path, id: &str) -> Result<Option<Process>, Error> {
    let Ok(text) = fs::read_to_string(pid_file) else { return Ok(None) };
    let number = text.trim().parse().ok().filter(|number| *number > 0);
    let Some(pid) = number.and_then(Pid::from_raw) else { return Ok(None) };
    // Held first, looked at afterwards.
    let process = Process::of_child(pid).map_err(Error::Hold)?;
    let deadline = Instant::now() + BECOMES;
    while process.is_alive() && Instant::now() < deadline {
        let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        if line.split(|byte| *byte == 0).any(|word| word == mark(id).as_bytes()) {
            return Ok(Some(process));
        }
        std::thread::sleep(LOOK);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jailer_is_told_whom_to_start_as_whom_and_where() {
        let words = arguments(Path::new("/opt/firecracker"), USERS.start, "00ff", Path::new("/d/jail"));
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let (jailer, firecracker) = words.split_at(words.iter().position(|word| *word == "--").unwrap());
        assert!(jailer.windows(2).any(|pair| pair == ["--uid", "1879048192"]), "{jailer:?}");
        assert!(jailer.contains(&"--new-pid-ns") && jailer.contains(&"imp-00ff"), "{jailer:?}");
        assert!(firecracker.iter().all(|word| !word.starts_with('/')), "{firecracker:?}");
        let root = root(Path::new("/d/jail"), Path::new("/opt/firecracker"), "00ff");
        assert_eq!(root, Path::new("/d/jail/firecracker/imp-00ff/root"));
        assert_eq!(name_inside(Path::new("/opt/firecracker")), "/firecracker");
    }

    #[tokio::test]
    async fn a_number_in_the_jail_that_is_another_process_s_is_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("firecracker.pid");
        assert!(started(&file, "00ff").unwrap().is_none());
        for text in ["", "x", "0", "-1"] {
            fs::write(&file, text).unwrap();
            assert!(started(&file, "00ff").unwrap().is_none(), "{text}");
        }
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(&file, child.id().to_string()).unwrap();
        assert!(started(&file, "00ff").unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_jail_goes_with_what_was_brought_into_it_and_that_stays() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (file, base) = (directory.path().join("file"), directory.path().join("jail"));
        fs::write(&file, "content").unwrap();
        fs::create_dir_all(base.join("root")).unwrap();
        let inside = base.join("root/file");
        bring(&file, &inside, None).unwrap();
        assert_eq!(fs::read_to_string(&inside).unwrap(), "content");
        assert!(fs::write(&inside, "changed").is_err(), "it is there for reading only");
        remove(&base).unwrap();
        assert!(!base.exists() && fs::read_to_string(&file).unwrap() == "content");
        remove(&base).unwrap();
    }
}
