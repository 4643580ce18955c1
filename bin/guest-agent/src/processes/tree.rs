//! All descendants of one process, as something that can be signalled, killed and limited together.
//!
//! A cgroup (v2) holds them however they fork and whatever session they make. Where there is none, the session and the
//! lines of parents found in /proc stand in: a process that leaves both escapes.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use imp_sys::signals::{self, Number};

use super::kernel_log;
use super::spec::{Limits, ProcessId};
use crate::processes::listing;

/// Prefix of a process's cgroup, so that no id is the name of one of the kernel's own files.
const PREFIX: &str = "exec.";
/// Below it a cgroup costs the kernel a fraction of what one with controllers does. Only a limit needs those, and the main
/// process may give parts of its own to containers.
const FREE: &str = "free";
/// Processor time is given out in slices of this length.
const CPU_PERIOD_MICROSECONDS: u64 = 100_000;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no cgroup could be made at {path}")]
    Make { path: PathBuf, source: io::Error },
    #[error("the guest's kernel does not take the limit {file} = {value}")]
    Limit { file: &'static str, value: String, source: io::Error },
    #[error("limits of memory, processes and processor need cgroup v2, which this guest does not have")]
    NoCgroups,
}

/// Where the cgroups of processes are made.
#[derive(Debug)]
pub(crate) struct Forest {
    root: Option<PathBuf>,
    controllers: OnceLock<()>,
}

#[derive(Debug)]
pub(crate) enum Tree {
    Cgroup(PathBuf),
    Session(u32),
    /// The image's init as PID 1: signals go to it alone, and nothing kills it.
    Init,
}

impl Forest {
    /// Cgroups are made below `root`, a directory of a cgroup2 file system; none where that is not to be had.
    pub(crate) fn new(root: Option<PathBuf>) -> Self {
        let root = root
            .filter(|root| fs::create_dir_all(root.join(FREE)).is_ok() && root.join("cgroup.kill").exists());
        Self { root, controllers: OnceLock::new() }
    }

    /// A tree for a process that is about to start, and the directory that it begins in.
    pub(crate) fn plant(&self, id: &ProcessId, limits: &Limits) -> Result<Option<(PathBuf, File)>, Error> {
        let limited =
            limits.memory_bytes.is_some() || limits.processes.is_some() || limits.cpu_millis.is_some();
        let Some(root) = &self.root else {
            return if limited { Err(Error::NoCgroups) } else { Ok(None) };
        };
        self.controllers.get_or_init(|| delegate(root));
        let parent = if limited || id.is_main() { root.clone() } else { root.join(FREE) };
        let path = parent.join(format!("{PREFIX}{}", id.as_str()));
        let make = |source| Error::Make { path: path.clone(), source };
        match fs::create_dir(&path) {
            // What an earlier process of this id has left behind and that nobody is in any more.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_dir(&path).and_then(|()| fs::create_dir(&path)).map_err(make)?;
            }
            made => made.map_err(make)?,
        }
        let planted = limit(&path, limits).and_then(|()| File::open(&path).map_err(make));
        match planted {
            Ok(directory) => Ok(Some((path, directory))),
            Err(error) => {
                let _ = fs::remove_dir(&path);
                Err(error)
            }
        }
    }
}

/// Lets the children of `root` have controllers. One that is not there is missed only by a limit that needs it.
fn delegate(root: &Path) {
    for directory in root.ancestors().skip(1).take(2).collect::<Vec<_>>().into_iter().rev().chain([root]) {
        for controller in ["+memory", "+pids", "+cpu"] {
            let _ = fs::write(directory.join("cgroup.subtree_control"), controller);
        }
    }
}

fn limit(path: &Path, limits: &Limits) -> Result<(), Error> {
    let set = |file: &'static str, value: String| match fs::write(path.join(file), &value) {
        Ok(()) => Ok(()),
        Err(source) => Err(Error::Limit { file, value, source }),
    };
    if let Some(bytes) = limits.memory_bytes {
        set("memory.max", bytes.to_string())?;
        // Without swap of its own a process cannot go around its limit; a guest without swap has no such file.
        let _ = set("memory.swap.max", "0".into());
    }
    if let Some(processes) = limits.processes {
        set("pids.max", processes.to_string())?;
    }
    if let Some(millis) = limits.cpu_millis {
        let quota = (u64::from(millis) * CPU_PERIOD_MICROSECONDS / 1000).max(1000);
        set("cpu.max", format!("{quota} {CPU_PERIOD_MICROSECONDS}"))?;
    }
    Ok(())
}

/// Id of the process whose cgroup this line of /proc/PID/cgroup names.
pub(crate) fn exec_of(cgroup: &str) -> Option<&str> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    path.split('/').find_map(|name| name.strip_prefix(PREFIX))
}

impl Tree {
    pub(crate) fn kill(&self) {
        match self {
            Self::Cgroup(path) => {
                if fs::write(path.join("cgroup.kill"), "1").is_err() {
                    self.signal(Number::KILL);
                }
            }
            Self::Session(_) => self.signal(Number::KILL),
            Self::Init => {}
        }
    }

    pub(crate) fn signal(&self, signal: Number) {
        for pid in self.members() {
            // One that has just ended needs no signal.
            let _ = signals::send(pid, signal);
        }
    }

    /// Whether the kernel has killed a member for lack of memory; `first` is the process that it began with.
    pub(crate) fn out_of_memory(&self, first: u32) -> bool {
        let Self::Cgroup(path) = self else { return false };
        match fs::read_to_string(path.join("memory.events")) {
            Ok(events) => {
                events.lines().filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count != "0")
            }
            // It has no controllers.
            Err(_) => kernel_log::says_out_of_memory(first),
        }
    }

    /// Removes the cgroup once the last member has ended.
    pub(crate) async fn fell(&self) {
        let Self::Cgroup(path) = self else { return };
        let mut pause = Duration::from_millis(5);
        while let Err(error) = fs::remove_dir(path) {
            if error.raw_os_error() != Some(rustix::io::Errno::BUSY.raw_os_error()) {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(10));
        }
    }

    fn members(&self) -> Vec<u32> {
        match self {
            Self::Cgroup(path) => members_below(path),
            Self::Session(leader) => listing::descendants(*leader),
            Self::Init => vec![1],
        }
    }
}

/// Processes of a cgroup and of those below it.
pub(crate) fn members_below(path: &Path) -> Vec<u32> {
    let mut members = Vec::new();
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        members.extend(procs.lines().filter_map(|line| line.parse::<u32>().ok()));
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        directories.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_cgroup_also_below_it() {
        assert_eq!(
            exec_of("1:name=systemd:/\n0::/imp/exec/exec.main/system.slice/x.service\n"),
            Some("main")
        );
        assert_eq!(exec_of("0::/imp/agent\n"), None);
        assert_eq!(exec_of("4:memory:/exec.no\n"), None);
    }
}
