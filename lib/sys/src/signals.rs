//! Signals as something to read, so that no handler ever runs.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Delivers the signals it was made for through a descriptor that becomes readable.
#[derive(Debug)]
pub struct SignalQueue(OwnedFd);

/// Blocks every signal in the calling thread, and in all threads it starts later, and queues `wanted`.
/// Call it while the process has one thread.
pub fn block_all(wanted: &[i32]) -> io::Result<SignalQueue> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut queued = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises the set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: initialises the set.
    unsafe { libc::sigemptyset(queued.as_mut_ptr()) };
    for &signal in wanted {
        // SAFETY: an initialised set; a number that is no signal is refused by the call.
        if unsafe { libc::sigaddset(queued.as_mut_ptr(), signal) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: an initialised set; the old one is not asked for.
    let result = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), ptr::null_mut()) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    // SAFETY: an initialised set.
    let fd = unsafe { libc::signalfd(-1, queued.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that was made just now and that nobody else owns.
    Ok(SignalQueue(unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl SignalQueue {
    /// Number of the next signal, or none when none is pending.
    pub fn next(&self) -> io::Result<Option<i32>> {
        let mut record = [0_u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut record) {
            // `ssi_signo` is the first field.
            Ok(_) => Ok(record.first_chunk::<4>().map(|number| i32::from_ne_bytes(*number))),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for SignalQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for SignalQueue {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// Number of a signal, 1 to 64: also the real-time ones, which rustix's type leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number(i32);

impl Number {
    pub const INT: Self = Self(libc::SIGINT);
    pub const KILL: Self = Self(libc::SIGKILL);
    pub const TERM: Self = Self(libc::SIGTERM);
    pub const USR1: Self = Self(libc::SIGUSR1);
    pub const USR2: Self = Self(libc::SIGUSR2);
    pub const PWR: Self = Self(libc::SIGPWR);
    pub const CHLD: Self = Self(libc::SIGCHLD);
    /// First and last real-time signal that the C libraries leave to programs.
    pub const REAL_TIME: (i32, i32) = (34, 64);

    #[must_use]
    pub fn new(number: i32) -> Option<Self> {
        (1..=64).contains(&number).then_some(Self(number))
    }

    #[must_use]
    pub fn get(self) -> i32 {
        self.0
    }
}

/// Sends a signal to one process.
pub fn send(pid: u32, signal: Number) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
    kill(pid, signal)
}

/// Sends a signal to the process behind a pidfd; no other one ever gets it, also when the pid is somebody else's by now.
pub fn send_to(process: impl AsFd, signal: Number) -> io::Result<()> {
    // SAFETY: one from 1 to 64. The C library has those for itself that it leaves out, and only this process must not
    // be disturbed in its use of them.
    let signal = unsafe { rustix::process::Signal::from_raw_unchecked(signal.0) };
    Ok(rustix::process::pidfd_send_signal(process, signal)?)
}

/// Sends a signal to every process but this one and PID 1.
pub fn send_to_all(signal: Number) -> io::Result<()> {
    kill(-1, signal)
}

fn kill(target: i32, signal: Number) -> io::Result<()> {
    // SAFETY: no pointers.
    if unsafe { libc::kill(target, signal.0) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn a_process_that_was_waited_for_gets_no_signal_any_more_and_neither_does_another() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let real_time = Number::new(Number::REAL_TIME.0 + 1).unwrap();
        send_to(&pidfd, real_time).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(real_time.get()));
        let error = send_to(&pidfd, Number::KILL).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::SRCH.raw_os_error()));
    }
}
