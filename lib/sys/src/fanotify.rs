//! fanotify(7): the kernel asks this process before it lets others open files of a file system, and holds them until then.
//! For root only.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whoever asks to be asked. When it is dropped, everybody who is held goes on.
#[derive(Debug)]
pub struct Group(OwnedFd);

/// A process that is held at the file that it opens until it is [allowed](Group::allow) to. It can be killed.
#[derive(Debug)]
pub struct Opening {
    pub pid: u32,
    pub purpose: Purpose,
    /// The file, as the path of /proc/self/fd names it.
    pub file: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Open,
    /// A program is opened to be executed. The same file is asked for again as [`Purpose::Open`].
    Execute,
}

impl Group {
    /// Is asked for all files of the file system at this path, also by this process itself.
    pub fn of_file_system(at: &Path) -> io::Result<Self> {
        let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC | libc::FAN_UNLIMITED_QUEUE;
        let files = (libc::O_RDONLY | libc::O_CLOEXEC) as libc::c_uint;
        // SAFETY: takes numbers only.
        let group = unsafe { libc::fanotify_init(flags, files) };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just opened, and is nobody else's.
        let group = Self(unsafe { OwnedFd::from_raw_fd(group) });
        let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
        let mask = libc::FAN_OPEN_PERM | libc::FAN_OPEN_EXEC_PERM;
        let path = CString::new(at.as_os_str().as_bytes())?;
        // SAFETY: the path ends with a null byte and lives until after the call.
        let marked =
            unsafe { libc::fanotify_mark(group.0.as_raw_fd(), flags, mask, libc::AT_FDCWD, path.as_ptr()) };
        if marked == 0 { Ok(group) } else { Err(io::Error::last_os_error()) }
    }

    /// Waits until somebody opens something; those who do must be allowed to.
    pub fn openings(&self) -> io::Result<Vec<Opening>> {
        let mut buffer = [0; 4096];
        let length = rustix::io::read(&self.0, &mut buffer)?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        let mut openings = Vec::new();
        while let Some(event) = Event::first(rest) {
            // Without one it says that some were lost, which an unlimited queue does not.
            if event.file >= 0 {
                openings.push(Opening {
                    pid: event.pid,
                    purpose: event.purpose,
                    // SAFETY: the kernel has opened it for the reader of the event alone.
                    file: unsafe { OwnedFd::from_raw_fd(event.file) },
                });
            }
            rest = rest.get(event.length..).unwrap_or_default();
        }
        Ok(openings)
    }

    /// Whoever was killed meanwhile is no error.
    pub fn allow(&self, opening: &Opening) -> io::Result<()> {
        let [file, answer] = [opening.file.as_raw_fd().to_ne_bytes(), libc::FAN_ALLOW.to_ne_bytes()];
        match rustix::io::write(&self.0, &[file, answer].concat()) {
            Ok(_) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `struct fanotify_event_metadata` of <linux/fanotify.h>.
struct Event {
    length: usize,
    purpose: Purpose,
    file: RawFd,
    pid: u32,
}

impl Event {
    const SHORTEST: usize = size_of::<libc::fanotify_event_metadata>();

    fn first(bytes: &[u8]) -> Option<Self> {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let mask = u64::from_ne_bytes(*bytes.get(8..)?.first_chunk()?);
        let file = RawFd::from_ne_bytes(*bytes.get(16..)?.first_chunk()?);
        let pid = u32::from_ne_bytes(*bytes.get(20..)?.first_chunk()?);
        let purpose = if mask & libc::FAN_OPEN_EXEC_PERM == 0 { Purpose::Open } else { Purpose::Execute };
        (length >= Self::SHORTEST).then_some(Self { length, purpose, file, pid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_read_as_the_kernel_writes_it() {
        let mut bytes = Vec::new();
        bytes.extend(24_u32.to_ne_bytes());
        bytes.extend([3, 0, 24, 0]);
        bytes.extend(libc::FAN_OPEN_EXEC_PERM.to_ne_bytes());
        bytes.extend(7_i32.to_ne_bytes());
        bytes.extend(1234_i32.to_ne_bytes());
        let event = Event::first(&bytes).unwrap();
        assert_eq!((event.length, event.purpose, event.file, event.pid), (24, Purpose::Execute, 7, 1234));
        assert!(Event::first(&bytes[..23]).is_none());
        bytes[0] = 0;
        assert!(Event::first(&bytes).is_none(), "it would be read for ever");
    }
}
