//! A process that may outlive its owner: named by pid, start time and boot, held by a pidfd, so that a number which now
//! belongs to another process is never signalled.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use crate::status::VmmEnd;

/// What is kept on disk of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    pub pid: i32,
    /// Clock ticks from boot to its start: field 22 of /proc/PID/stat.
    pub start_ticks: u64,
    /// /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot hold process {pid}")]
    Open {
        pid: i32,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no start time", path.display())]
    NoStartTime { path: PathBuf },
}

/// A held process. Dropping it does not end it.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    record: ProcessRecord,
    pidfd: Arc<AsyncFd<OwnedFd>>,
}

impl Process {
    /// Holds a child that has not been waited for, so its pid is still its own.
    pub(crate) fn of_child(pid: Pid) -> Result<Self, Error> {
        let pidfd = open(pid)?;
        let start_ticks = start_ticks(pid)?;
        Self::new(pid, start_ticks, boot_id()?, pidfd)
    }

    /// Holds the process of the record if it still lives.
    pub(crate) fn adopt(record: &ProcessRecord) -> Result<Option<Self>, Error> {
        let Some(pid) = Pid::from_raw(record.pid) else { return Ok(None) };
        if record.boot_id != boot_id()? {
            return Ok(None);
        }
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(source) => return Err(Error::Open { pid: record.pid, source: source.into() }),
        };
        let start_ticks = match start_ticks(pid) {
            Ok(ticks) => ticks,
            Err(Error::Read { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let process = Self::new(pid, start_ticks, record.boot_id.clone(), pidfd)?;
        // The pidfd was opened before the start time was read. If its process still lives, then the pid has not passed
        // to another one in between, and the time that was read is that of this process.
        let same = process.is_alive() && process.record.start_ticks == record.start_ticks;
        Ok(same.then_some(process))
    }

    fn new(pid: Pid, start_ticks: u64, boot_id: String, pidfd: OwnedFd) -> Result<Self, Error> {
        let number = pid.as_raw_nonzero().get();
        let pidfd =
            imp_sys::readiness::readable(pidfd).map_err(|source| Error::Open { pid: number, source })?;
        Ok(Self { record: ProcessRecord { pid: number, start_ticks, boot_id }, pidfd: Arc::new(pidfd) })
    }

    pub(crate) fn record(&self) -> &ProcessRecord {
        &self.record
    }

    pub(crate) fn pid(&self) -> u32 {
        self.record.pid.unsigned_abs()
    }

    pub(crate) fn is_alive(&self) -> bool {
        // Signal 0 would say yes to a zombie; a pidfd is readable from the moment of the exit.
        let mut poll = [rustix::event::PollFd::new(self.pidfd.get_ref(), rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        !matches!(rustix::event::poll(&mut poll, Some(&now)), Ok(1))
    }

    /// Ends it at once. A process that is gone already is no error.
    pub(crate) fn kill(&self) {
        if let Err(error) = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL)
            && error != rustix::io::Errno::SRCH
        {
            tracing::warn!(pid = self.record.pid, %error, "cannot kill a process");
        }
    }

    /// Waits until it has ended, and leaves it to be reaped.
    pub(crate) async fn gone(&self) {
        if let Err(error) = self.pidfd.readable().await {
            tracing::warn!(pid = self.record.pid, %error, "cannot wait for a process");
        }
    }

    /// Waits for its end; reaps it if it is a child.
    pub(crate) async fn ended(&self) -> VmmEnd {
        self.gone().await;
        self.reap()
    }

    /// How it has ended, if it has and is a child; then nobody else can ask.
    pub(crate) fn reap(&self) -> VmmEnd {
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => VmmEnd::Exit(code),
                (None, Some(signal)) => VmmEnd::Signal(signal),
                (None, None) => VmmEnd::Unknown,
            },
            Ok(None) | Err(_) => VmmEnd::Unknown,
        }
    }
}

fn open(pid: Pid) -> Result<OwnedFd, Error> {
    pidfd_open(pid, PidfdFlags::empty())
        .map_err(|source| Error::Open { pid: pid.as_raw_nonzero().get(), source: source.into() })
}

/// This boot's identity.
pub(crate) fn boot_id() -> Result<String, Error> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    Ok(text.trim().to_owned())
}

fn start_ticks(pid: Pid) -> Result<u64, Error> {
    let path = PathBuf::from(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let text = fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    parse_start_ticks(&text).ok_or(Error::NoStartTime { path })
}

/// Field 22. The second field is the program's name in parentheses, which may hold spaces and parentheses itself.
fn parse_start_ticks(stat: &[u8]) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(stat.get(end_of_name + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Processes that were started as `program` with exactly this argument among theirs: how a process is found whose owner
/// died between starting it and writing down its pid. The argument must hold a generated id.
pub(crate) fn find(program: &OsStr, argument: &OsStr) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(Pid::from_raw)
        .filter_map(|pid| {
            // Held first, looked at afterwards: what is killed is what was looked at.
            let process = Process::of_child(pid).ok()?;
            let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
            let mut words = line.split(|&b| b == 0);
            let found = words.next() == Some(program.as_bytes()) && words.any(|w| w == argument.as_bytes());
            (found && process.is_alive()).then_some(process)
        })
        .collect()
}

/// All processes that run as this user.
pub(crate) fn of_user(user: u32) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(Pid::from_raw)
        .filter_map(|pid| {
            // As above: held first.
            let process = Process::of_child(pid).ok()?;
            let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
            let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
            let runs_as = ids.split_ascii_whitespace().any(|id| id.parse() == Ok(user));
            (runs_as && process.is_alive()).then_some(process)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn sleeper() -> (std::process::Child, Pid) {
        let child = Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        (child, pid)
    }

    #[test]
    fn the_start_time_is_found_whatever_the_program_is_called() {
        let stat = b"12 (a) b (c)) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 2 3";
        assert_eq!(parse_start_ticks(stat), Some(987_654));
        assert_eq!(parse_start_ticks(b"12 sleep S 1"), None);
        assert_eq!(parse_start_ticks(b"12 (sleep) S 1"), None);
    }

    #[tokio::test]
    async fn a_recorded_pid_that_belongs_to_another_process_is_not_adopted() {
        let (mut child, pid) = sleeper();
        let process = Process::of_child(pid).unwrap();
        let same = process.record().clone();
        let earlier = ProcessRecord { start_ticks: same.start_ticks - 1, ..same.clone() };
        let other_boot =
            ProcessRecord { boot_id: "00000000-0000-0000-0000-000000000000".into(), ..same.clone() };
        assert!(Process::adopt(&same).unwrap().is_some());
        assert!(Process::adopt(&earlier).unwrap().is_none());
        assert!(Process::adopt(&other_boot).unwrap().is_none());
        process.kill();
        assert_eq!(process.ended().await, VmmEnd::Signal(9));
        assert!(Process::adopt(&same).unwrap().is_none());
        // Reaped through the pidfd: the handle has nothing left to wait for.
        assert!(child.try_wait().is_err());
    }

    #[tokio::test]
    async fn a_dead_process_that_nobody_has_waited_for_does_not_count_as_alive() {
        let (mut child, pid) = sleeper();
        let process = Process::of_child(pid).unwrap();
        child.kill().unwrap();
        process.pidfd.readable().await.unwrap().retain_ready();
        assert!(!process.is_alive());
        assert!(Process::adopt(process.record()).unwrap().is_none());
        assert_eq!(child.wait().unwrap().code(), None);
    }

    #[tokio::test]
    async fn an_unrecorded_process_is_found_by_its_exact_argument() {
        let argument = "1000.00700700700700701";
        let mut child = Command::new("/bin/sleep").arg(argument).spawn().unwrap();
        let found = find(OsStr::new("/bin/sleep"), OsStr::new(argument));
        assert_eq!(found.iter().map(Process::pid).collect::<Vec<_>>(), [child.id()]);
        assert!(find(OsStr::new("/bin/sleep"), OsStr::new("1000.0070070070070070")).is_empty());
        assert!(find(OsStr::new("/bin/cat"), OsStr::new(argument)).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn the_processes_of_a_user_are_found_and_no_others() {
        let (mut child, pid) = sleeper();
        let own = of_user(rustix::process::geteuid().as_raw());
        assert!(own.iter().any(|process| process.pid() == pid.as_raw_nonzero().get().unsigned_abs()));
        assert!(of_user(u32::MAX - 7).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
