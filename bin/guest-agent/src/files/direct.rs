//! A file that is read or written past the page cache as long as its file system and its alignment allow it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// No device wants memory and places in a file aligned to more.
pub(super) const ALIGNMENT: usize = 4 << 10;

#[derive(Debug)]
pub(super) struct Direct {
    file: OwnedFd,
    way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Cached,
}

impl Direct {
    /// Through the cache at first.
    pub(super) fn new(file: OwnedFd) -> Self {
        Self { file, way: Way::Cached }
    }

    /// From here on past the cache. A file system that cannot do it says so, and stays with the cache.
    pub(super) fn start(&mut self) {
        if self.set(OFlags::DIRECT).is_ok() {
            self.way = Way::Direct;
        }
    }

    /// From here on through the cache.
    pub(super) fn stop(&mut self) -> Result<(), Errno> {
        if self.is_direct() {
            self.set(OFlags::empty())?;
        }
        self.way = Way::Cached;
        Ok(())
    }

    pub(super) fn is_direct(&self) -> bool {
        self.way == Way::Direct
    }

    /// What to do about an error of a read or a write: a file system may refuse only then, and so may one that has done a
    /// part of it. It is to be tried again, if it is not returned.
    pub(super) fn refused(&mut self, error: Errno) -> Result<(), Errno> {
        match error {
            Errno::INTR => Ok(()),
            Errno::INVAL if self.is_direct() => self.stop(),
            error => Err(error),
        }
    }

    pub(super) fn into_file(self) -> OwnedFd {
        self.file
    }

    fn set(&self, direct: OFlags) -> Result<(), Errno> {
        fcntl_setfl(&self.file, fcntl_getfl(&self.file)?.difference(OFlags::DIRECT) | direct)
    }
}

impl AsFd for Direct {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_system_refuses_directly_is_tried_through_the_cache_once() {
        let mut file = Direct::new(tempfile::tempfile_in("/var/tmp").unwrap().into());
        assert_eq!(file.refused(Errno::INVAL), Err(Errno::INVAL));
        file.start();
        if file.is_direct() {
            assert!(fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT));
            assert_eq!(file.refused(Errno::INVAL), Ok(()));
        }
        assert!(!file.is_direct() && !fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT));
        assert_eq!(file.refused(Errno::INTR), Ok(()));
        assert_eq!(file.refused(Errno::INVAL), Err(Errno::INVAL));
    }
}
