//! Brings a disk to a second place: by link, by shared blocks, or by copying what is allocated.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

use super::partial::Partial;
use super::{Error, is_full};

/// How a file came to its second place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The same file under a second name.
    Linked,
    /// A file of its own that shares blocks until one of them is written.
    Reflinked,
    /// A copy of the allocated parts; holes stay holes.
    Copied,
}

/// Makes `to` an independent copy of the scratch disk `from`, sharing blocks where the file system can.
///
/// `from` must not change meanwhile: its VM is stopped or paused. An existing `to` is replaced.
pub fn clone_scratch(from: &Path, to: &Path) -> Result<Placement, Error> {
    copy(from, to).map_err(|source| failed(from, to, source))
}

/// Makes `to` hold the same bytes as the file `from`, which is never written again: a link, else shared blocks, else a copy.
///
/// The caller reports anything but a link. An existing `to` is an error.
pub fn place_immutable(from: &Path, to: &Path) -> Result<Placement, Error> {
    match std::fs::hard_link(from, to) {
        Ok(()) => Ok(Placement::Linked),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(failed(from, to, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(failed(from, to, error)),
        // Another file system, one without links, too many of them, or links to files of others forbidden.
        Err(_) => copy(from, to).map_err(|source| failed(from, to, source)),
    }
}

fn failed(from: &Path, to: &Path, source: io::Error) -> Error {
    if is_full(&source) {
        return Error::DiskFull { path: to.to_owned(), source };
    }
    Error::Copy { from: from.to_owned(), to: to.to_owned(), source }
}

fn copy(from: &Path, to: &Path) -> io::Result<Placement> {
    let source = File::open(from)?;
    let partial = Partial::create(to)?;
    let placement = match ioctl_ficlone(partial.file(), &source) {
        Ok(()) => Placement::Reflinked,
        Err(_) => {
            copy_allocated(&source, partial.file())?;
            Placement::Copied
        }
    };
    partial.commit_unsynced()?;
    Ok(placement)
}

fn copy_allocated(source: &File, target: &File) -> io::Result<()> {
    let size = source.metadata()?.len();
    target.set_len(size)?;
    let mut position = 0;
    loop {
        let start = match seek(source, SeekFrom::Data(position)) {
            Ok(start) => start,
            // Behind the last data.
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(source, SeekFrom::Hole(start))?;
        copy_range(source, target, start, end)?;
        position = end;
    }
}

fn copy_range(source: &File, target: &File, start: u64, end: u64) -> io::Result<()> {
    let mut position = start;
    while position < end {
        let (mut from, mut to) = (position, position);
        let length = usize::try_from(end - position).unwrap_or(usize::MAX);
        match copy_file_range(source, Some(&mut from), target, Some(&mut to), length) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(copied) => position += copied as u64,
            Err(Errno::XDEV | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                return copy_through_memory(source, target, position, end);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// For pairs of file systems between which the kernel does not copy.
fn copy_through_memory(source: &File, target: &File, start: u64, end: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 1 << 20];
    let mut position = start;
    while position < end {
        let length = usize::try_from(end - position).unwrap_or(usize::MAX).min(buffer.len());
        let part = buffer.get_mut(..length).expect("no longer than the buffer");
        source.read_exact_at(part, position)?;
        target.write_all_at(part, position)?;
        position += length as u64;
    }
    Ok(())
}
