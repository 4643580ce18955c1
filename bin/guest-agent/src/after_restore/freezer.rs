//! Freezes every process that is not Imp's own, whatever the image's init has made of the cgroups.
//!
//! ```text
//! /                  processes of an init that uses no cgroups: moved to imp/rest, because a root cannot be frozen
//! ├─ imp/agent       never
//! ├─ imp/hooks       never
//! ├─ imp/exec        frozen: what the agent has started
//! ├─ imp/rest        frozen
//! └─ init.scope, …   frozen: what the image's init has made
//! ```
//! What is frozen already belongs to somebody in the guest, and is left to them.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use crate::processes::{is_kernel_thread, members_below};

/// Directory of the agent, and what in it is never frozen.
const IMP: &str = "imp";
const REST: &str = "rest";
pub(super) const HOOKS: &str = "hooks";
const NEVER: [&str; 2] = ["agent", HOOKS];
/// Looks at a tree whose processes fork while they are moved.
const ROUNDS: usize = 100;
/// Longest cgroup.events that there is.
const EVENTS: usize = 256;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the guest has no cgroup v2 file system with a freezer")]
    NoCgroups,
    #[error("{path}: {source}", path = path.display())]
    Cgroup { path: PathBuf, source: io::Error },
    #[error("{} did not freeze in time", path.display())]
    Late { path: PathBuf },
    #[error("processes come up outside of any cgroup faster than they can be frozen")]
    Restless,
}

/// What is frozen.
#[derive(Debug)]
pub(super) struct Freezer {
    scope: Scope,
    /// Cgroups that this has frozen.
    frozen: Mutex<Vec<PathBuf>>,
}

#[derive(Debug)]
enum Scope {
    /// All of a machine. The root of its hierarchy is held open: an init may mount another over it.
    Machine {
        root: PathBuf,
        _held: OwnedFd,
    },
    /// What the agent has started, and nothing else: an agent in a test.
    Processes(PathBuf),
    None,
}

impl Freezer {
    /// `machine`: the root of the hierarchy. `processes`: the cgroup below which the agent starts processes.
    pub(super) fn new(machine: Option<&Path>, processes: Option<PathBuf>) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let held = machine.and_then(|root| rustix::fs::open(root, flags, Mode::empty()).ok());
        let scope = match (held, processes) {
            (Some(held), _) => {
                Scope::Machine { root: format!("/proc/self/fd/{}", held.as_raw_fd()).into(), _held: held }
            }
            (None, Some(processes)) if machine.is_none() => Scope::Processes(processes),
            (None, _) => Scope::None,
        };
        Self { scope, frozen: Mutex::default() }
    }

    /// The directory in which a cgroup for hooks may be made.
    pub(super) fn hooks(&self) -> Option<PathBuf> {
        match &self.scope {
            Scope::Machine { root, .. } => Some(root.join(IMP).join(HOOKS)),
            Scope::Processes(_) | Scope::None => None,
        }
    }

    /// Returns when all are frozen: how many. After an error some may be frozen: thaw.
    pub(super) fn freeze(&self, deadline: Instant) -> Result<u32, Error> {
        if matches!(self.scope, Scope::None) {
            return Err(Error::NoCgroups);
        }
        for _ in 0..ROUNDS {
            let moved = self.gather()?;
            let news = self.freeze_new_trees()?;
            for path in self.frozen_trees() {
                wait_until_frozen(&path, deadline)?;
            }
            if !moved && !news {
                return Ok(self.members().len() as u32);
            }
        }
        Err(Error::Restless)
    }

    /// How many run again.
    pub(super) fn thaw(&self) -> u32 {
        let members = self.members().len() as u32;
        if let Scope::Machine { root, .. } = &self.scope {
            scatter(root);
        }
        for path in std::mem::take(&mut *self.frozen.lock().unwrap_or_else(PoisonError::into_inner)) {
            // One that is gone has nobody to thaw.
            let _ = fs::write(path.join("cgroup.freeze"), "0");
        }
        members
    }

    /// After the death of an agent that had frozen something; its successor knows of nothing.
    pub(super) fn thaw_leftovers(&self) {
        let trees = self.trees();
        *self.frozen.lock().unwrap_or_else(PoisonError::into_inner) = trees;
        self.thaw();
    }

    /// All processes in what is frozen.
    pub(super) fn members(&self) -> Vec<u32> {
        self.frozen_trees().iter().flat_map(|tree| members_below(tree)).collect()
    }

    fn frozen_trees(&self) -> Vec<PathBuf> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The cgroups that hold all processes but those of the root and Imp's own.
    fn trees(&self) -> Vec<PathBuf> {
        let root = match &self.scope {
            Scope::Machine { root, .. } => root,
            Scope::Processes(processes) => return vec![processes.clone()],
            Scope::None => return Vec::new(),
        };
        let mut trees = children(root, &[IMP]);
        trees.extend(children(&root.join(IMP), &NEVER));
        trees
    }

    /// Whether there were trees that were not frozen yet.
    fn freeze_new_trees(&self) -> Result<bool, Error> {
        let mut news = false;
        for path in self.trees() {
            let file = path.join("cgroup.freeze");
            let state = match fs::read_to_string(&file) {
                // It was removed meanwhile.
                Err(error) if is_gone(&error) => continue,
                state => state.map_err(|source| Error::Cgroup { path: file.clone(), source })?,
            };
            if state.trim_end() == "0" {
                // Before it is done: whoever thaws must know.
                self.frozen.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
                match fs::write(&file, "1") {
                    Err(error) if is_gone(&error) => {}
                    written => written.map_err(|source| Error::Cgroup { path: file, source })?,
                }
                news = true;
            }
        }
        Ok(news)
    }

    /// Moves the processes of the root into a cgroup that can be frozen. Whether there were any.
    fn gather(&self) -> Result<bool, Error> {
        let Scope::Machine { root, .. } = &self.scope else { return Ok(false) };
        let strays = strays(root);
        if strays.is_empty() {
            return Ok(false);
        }
        let rest = root.join(IMP).join(REST);
        let cgroup = |source| Error::Cgroup { path: rest.clone(), source };
        fs::create_dir_all(&rest).map_err(cgroup)?;
        for pid in strays {
            match fs::write(rest.join("cgroup.procs"), pid.to_string()) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                written => written.map_err(cgroup)?,
            }
        }
        Ok(true)
    }
}

/// Processes of the root that are neither the kernel's nor Imp's own.
fn strays(root: &Path) -> Vec<u32> {
    let own = program("self");
    let procs = fs::read_to_string(root.join("cgroup.procs")).unwrap_or_default();
    procs
        .lines()
        .filter_map(|line| line.parse().ok())
        .filter(|pid| !is_kernel_thread(*pid))
        .filter(|pid| !own.as_ref().zip(program(&pid.to_string())).is_some_and(|(own, it)| same(own, &it)))
        .collect()
}

/// Back to where they were: an init that is about to use cgroups finds itself at the root. That thaws them, too.
fn scatter(root: &Path) {
    let rest = root.join(IMP).join(REST);
    for _ in 0..ROUNDS {
        let procs = fs::read_to_string(rest.join("cgroup.procs")).unwrap_or_default();
        if procs.is_empty() {
            return;
        }
        for pid in procs.lines() {
            let _ = fs::write(root.join("cgroup.procs"), pid);
        }
    }
}

fn program(pid: &str) -> Option<Metadata> {
    fs::metadata(format!("/proc/{pid}/exe")).ok()
}

fn same(one: &Metadata, two: &Metadata) -> bool {
    (one.dev(), one.ino()) == (two.dev(), two.ino())
}

fn children(directory: &Path, but: &[&str]) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| !but.iter().any(|name| entry.file_name() == *name))
        .map(|entry| entry.path())
        .collect()
}

fn wait_until_frozen(path: &Path, deadline: Instant) -> Result<(), Error> {
    let cgroup = |source| Error::Cgroup { path: path.to_owned(), source };
    let events = match File::open(path.join("cgroup.events")) {
        Err(error) if is_gone(&error) => return Ok(()),
        events => events.map_err(cgroup)?,
    };
    loop {
        // Read again from its start, which also takes note of the change that is waited for next.
        let mut text = [0; EVENTS];
        let length = match events.read_at(&mut text, 0) {
            Err(error) if is_gone(&error) => return Ok(()),
            length => length.map_err(cgroup)?,
        };
        if is_frozen(text.get(..length).unwrap_or_default()) {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Late { path: path.to_owned() });
        }
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled = [PollFd::new(&events, PollFlags::PRI)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(cgroup(error.into())),
        }
    }
}

fn is_frozen(events: &[u8]) -> bool {
    events.split(|byte| *byte == b'\n').any(|line| line == b"frozen 1")
}

/// Errors of a cgroup that is removed while it is looked at.
fn is_gone(error: &io::Error) -> bool {
    let gone = [rustix::io::Errno::NOENT, rustix::io::Errno::NODEV].map(|errno| Some(errno.raw_os_error()));
    gone.contains(&error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use super::*;

    /// A cgroup hierarchy of a test: a directory that plays the root of a machine's.
    struct Hierarchy {
        root: PathBuf,
        children: Vec<Child>,
    }

    impl Hierarchy {
        fn new(name: &str) -> Self {
            let hierarchy = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
            let top = hierarchy.into_iter().find(|path| path.join("cgroup.procs").exists()).unwrap();
            let root = top.join(format!("imp-test-{name}-{}", std::process::id()));
            for directory in ["imp/agent", "imp/exec/exec.1", "system.slice/a.service"] {
                fs::create_dir_all(root.join(directory)).unwrap();
            }
            Self { root, children: Vec::new() }
        }

        fn process(&mut self, cgroup: &str) -> u32 {
            let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let pid = child.id();
            self.children.push(child);
            fs::write(self.root.join(cgroup).join("cgroup.procs"), pid.to_string()).unwrap();
            pid
        }

        fn is_frozen(&self, cgroup: &str) -> bool {
            is_frozen(&fs::read(self.root.join(cgroup).join("cgroup.events")).unwrap())
        }
    }

    impl Drop for Hierarchy {
        fn drop(&mut self) {
            let _ = fs::write(self.root.join("cgroup.kill"), "1");
            for child in &mut self.children {
                let _ = child.wait();
            }
            for directory in [
                "imp/agent",
                "imp/exec/exec.1",
                "imp/exec",
                "imp/rest",
                "imp",
                "system.slice/a.service",
                "system.slice",
                "",
            ] {
                let _ = fs::remove_dir(self.root.join(directory));
            }
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn all_but_imp_s_own_freeze_wherever_they_are_and_go_back_there() {
        let mut hierarchy = Hierarchy::new("freeze");
        let stray = hierarchy.process("");
        hierarchy.process("imp/exec/exec.1");
        hierarchy.process("system.slice/a.service");
        hierarchy.process("imp/agent");
        let freezer = Freezer::new(Some(&hierarchy.root), None);
        assert_eq!(freezer.freeze(soon()).unwrap(), 3);
        for (cgroup, frozen) in [
            ("imp/exec/exec.1", true),
            ("system.slice/a.service", true),
            ("imp/rest", true),
            ("imp/agent", false),
        ] {
            assert_eq!(hierarchy.is_frozen(cgroup), frozen, "{cgroup}");
        }
        assert_eq!(freezer.freeze(soon()).unwrap(), 3);
        assert_eq!(freezer.thaw(), 3);
        for cgroup in ["imp/exec/exec.1", "system.slice/a.service"] {
            assert!(!hierarchy.is_frozen(cgroup), "{cgroup}");
        }
        assert_eq!(
            fs::read_to_string(hierarchy.root.join("cgroup.procs")).unwrap().trim(),
            stray.to_string()
        );
        assert_eq!(freezer.thaw(), 0);
    }

    #[test]
    fn what_the_guest_has_frozen_itself_stays_frozen() {
        let mut hierarchy = Hierarchy::new("own");
        hierarchy.process("system.slice/a.service");
        fs::write(hierarchy.root.join("system.slice/cgroup.freeze"), "1").unwrap();
        wait_until_frozen(&hierarchy.root.join("system.slice"), soon()).unwrap();
        let freezer = Freezer::new(Some(&hierarchy.root), None);
        assert_eq!(freezer.freeze(soon()).unwrap(), 0);
        freezer.thaw();
        assert!(hierarchy.is_frozen("system.slice"));
        // As does what an agent that died has frozen, until the next one comes.
        freezer.thaw_leftovers();
        assert!(!hierarchy.is_frozen("system.slice"));
    }

    #[test]
    fn without_cgroups_nothing_sleeps() {
        let freezer = Freezer::new(Some(Path::new("/nonexistent")), None);
        assert!(matches!(freezer.freeze(soon()), Err(Error::NoCgroups)));
    }

    #[test]
    fn the_line_of_the_events_counts() {
        assert!(is_frozen(b"populated 1\nfrozen 1\n"));
        assert!(!is_frozen(b"populated 1\nfrozen 0\n"));
        assert!(!is_frozen(b""));
    }
}
