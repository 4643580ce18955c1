//! What of a file is in the page cache, and who pays for it: the control group of the process that brought it there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;

use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, Signal, WaitOptions};

/// The kernel cuts what it is asked to read ahead to what it likes to read at once.
const PIECE: u64 = 128 << 10;

/// For each page of the file's first `length` bytes, whether it is in the page cache. Of a file that is neither this
/// process's nor may be written by it, the kernel says that all of it is.
pub fn resident(file: &File, length: usize) -> io::Result<Vec<bool>> {
    if length == 0 {
        return Ok(Vec::new());
    }
    let mut pages = vec![0_u8; length.div_ceil(rustix::param::page_size())];
    // SAFETY: a new mapping at a place of the kernel's choice touches no other memory, and nothing is read through it.
    let mapped = unsafe {
        rustix::mm::mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0)
    }?;
    // SAFETY: the mapping has `length` bytes and starts at a page, and there is a byte for each of its pages.
    let result = unsafe { libc::mincore(mapped, length, pages.as_mut_ptr()) };
    let error = io::Error::last_os_error();
    // SAFETY: the mapping was made above, and nobody else knows of it.
    unsafe { rustix::mm::munmap(mapped, length) }?;
    if result == 0 { Ok(pages.iter().map(|page| page & 1 == 1).collect()) } else { Err(error) }
}

/// Reads these parts of the file into the page cache, and returns when they are there.
pub fn read(file: BorrowedFd<'_>, parts: &[Range<u64>]) -> io::Result<()> {
    // All is asked for before any of it is waited for.
    for part in parts {
        let mut at = part.start;
        while at < part.end {
            let length = PIECE.min(part.end - at);
            rustix::fs::fadvise(file, at, std::num::NonZeroU64::new(length), Advice::WillNeed)?;
            at += length;
        }
    }
    let mut buffer = [0; 16 << 10];
    for part in parts {
        let mut at = part.start;
        while at < part.end {
            let length = usize::try_from(part.end - at).unwrap_or(usize::MAX).min(buffer.len());
            match rustix::io::pread(file, buffer.get_mut(..length).unwrap_or_default(), at)? {
                0 => break,
                count => at += count as u64,
            }
        }
    }
    Ok(())
}

/// As [`read`], by a process that is in the group whose `cgroup.procs` this is. It ends with this one.
pub fn read_for(group: BorrowedFd<'_>, file: BorrowedFd<'_>, parts: &[Range<u64>]) -> io::Result<()> {
    let parent = rustix::process::getpid();
    // SAFETY: the child goes on as this one thread. It makes system calls alone, so that it needs no lock and no memory that
    // another thread may have held, and never returns from here.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let done = die_with(parent).and_then(|()| join(group)).and_then(|()| read(file, parts));
            let code = done.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
            // SAFETY: nothing of this process is used any more.
            unsafe { libc::_exit(code) }
        }
        child => ended(child),
    }
}

fn die_with(parent: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before.
    if rustix::process::getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

fn join(group: BorrowedFd<'_>) -> io::Result<()> {
    // Whoever writes it.
    rustix::io::write(group, b"0").map(drop).map_err(io::Error::from)
}

fn ended(child: i32) -> io::Result<()> {
    let pid = Pid::from_raw(child);
    let status = rustix::process::waitpid(pid, WaitOptions::empty())?;
    match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code)),
        None => Err(io::ErrorKind::Interrupted.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const PAGES: usize = 300;

    /// Of which nothing is in the page cache, if its file system can do without it.
    fn cold() -> (tempfile::NamedTempFile, usize) {
        let mut file = tempfile::NamedTempFile::new_in(".").unwrap();
        let length = PAGES * rustix::param::page_size();
        file.write_all(&vec![1; length]).unwrap();
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
        (file, length)
    }

    #[test]
    fn what_is_read_is_resident_and_what_is_not_read_is_not() {
        let (file, length) = cold();
        if resident(file.as_file(), length).unwrap() != [false; PAGES] {
            return;
        }
        let page = rustix::param::page_size() as u64;
        // Far from each other: the kernel reads a little more than it was asked for.
        read(file.as_fd(), &[0..page, 200 * page..length as u64]).unwrap();
        let there = resident(file.as_file(), length).unwrap();
        assert!(there[0] && there[200..].iter().all(|page| *page), "{there:?}");
        assert!(!there[150]);
    }

    #[test]
    fn a_process_apart_joins_its_group_first_and_says_why_it_cannot() {
        let (file, length) = cold();
        let group = tempfile::NamedTempFile::new().unwrap();
        let all = std::iter::once(0..length as u64).collect::<Vec<_>>();
        read_for(group.as_fd(), file.as_fd(), &all).unwrap();
        assert_eq!(std::fs::read(group.path()).unwrap(), b"0");
        assert!(resident(file.as_file(), length).unwrap().iter().all(|page| *page));
        let read_only = File::open(group.path()).unwrap();
        let error = read_for(read_only.as_fd(), file.as_fd(), &all).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
