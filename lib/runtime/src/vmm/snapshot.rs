//! A machine's memory and state on disk, and what a later snapshot of it changes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, SeekFrom};

/// The files of one snapshot. They are whole, or the snapshot is not used: whoever makes them names them last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotFiles {
    /// Devices and processors, in a form of the VMM's own.
    pub state: PathBuf,
    /// The guest's memory, byte for byte. Of a snapshot of changes: only pages that have changed, the rest are holes.
    pub memory: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotKind {
    Full,
    /// What has changed since the machine's last whole snapshot, or since it was loaded.
    Changes,
}

#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} holds changes of {changes} bytes of memory, and {} is of {base}: they do not belong together",
        changes_path.display(), base_path.display()
    )]
    Sizes { changes_path: PathBuf, changes: u64, base_path: PathBuf, base: u64 },
}

const CHUNK: u64 = 1 << 20;

/// Writes the pages that `changes` holds over those of `base`, which must be a copy of its own: a file that a machine has
/// mapped must never change.
pub(crate) fn merge(changes: &Path, base: &Path) -> Result<(), MergeError> {
    let read = |source| MergeError::Read { path: changes.to_owned(), source };
    let write = |source| MergeError::Write { path: base.to_owned(), source };
    let from = plain_file(changes).map_err(read)?;
    let to = OpenOptions::new().write(true).open(base).map_err(write)?;
    let length = from.metadata().map_err(read)?.len();
    let base_length = to.metadata().map_err(write)?.len();
    if length != base_length {
        return Err(MergeError::Sizes {
            changes_path: changes.to_owned(),
            changes: length,
            base_path: base.to_owned(),
            base: base_length,
        });
    }
    let mut buffer = vec![0; CHUNK as usize];
    let mut at = 0;
    while let Some(start) = seek(&from, SeekFrom::Data(at)).map_err(read)? {
        let end = seek(&from, SeekFrom::Hole(start)).map_err(read)?.unwrap_or(length);
        at = start;
        while at < end {
            let size = (end - at).min(CHUNK) as usize;
            let chunk = buffer.get_mut(..size).unwrap_or_default();
            from.read_exact_at(chunk, at).map_err(read)?;
            to.write_all_at(chunk, at).map_err(write)?;
            at += size as u64;
        }
    }
    Ok(())
}

/// A machine's own process made it, which its guest may have taken over: it leads nowhere else, and nobody waits at it.
fn plain_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// `None`: there is nothing of the kind from there on.
fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn changed_pages_replace_those_of_the_base_and_holes_leave_them() {
        let directory = tempfile::tempdir().unwrap();
        let (base, changes) = (directory.path().join("base"), directory.path().join("changes"));
        let pages = 700;
        std::fs::write(&base, vec![1; pages * PAGE]).unwrap();
        let file = File::create(&changes).unwrap();
        file.set_len((pages * PAGE) as u64).unwrap();
        // The first, the last, a page of zeros, and more than one chunk in one piece.
        let changed = [0, 99, pages - 1].into_iter().chain(200..500);
        for page in changed.clone() {
            let content = if page == 99 { 0 } else { 2 };
            file.write_all_at(&[content; PAGE], (page * PAGE) as u64).unwrap();
        }
        merge(&changes, &base).unwrap();
        let merged = std::fs::read(&base).unwrap();
        let changed: std::collections::BTreeSet<usize> = changed.collect();
        for (page, content) in merged.chunks(PAGE).enumerate() {
            let expected = if page == 99 {
                0
            } else if changed.contains(&page) {
                2
            } else {
                1
            };
            assert!(content.iter().all(|byte| *byte == expected), "page {page}");
        }
    }

    #[test]
    fn changes_that_lead_elsewhere_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (base, changes) = (directory.path().join("base"), directory.path().join("changes"));
        std::fs::write(&base, vec![1; PAGE]).unwrap();
        std::fs::write(directory.path().join("secret"), vec![2; PAGE]).unwrap();
        std::os::unix::fs::symlink("secret", &changes).unwrap();
        assert!(matches!(merge(&changes, &base), Err(MergeError::Read { .. })));
        assert_eq!(std::fs::read(&base).unwrap(), vec![1; PAGE]);
    }

    #[test]
    fn changes_of_a_memory_of_another_size_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (base, changes) = (directory.path().join("base"), directory.path().join("changes"));
        std::fs::write(&base, vec![1; PAGE]).unwrap();
        std::fs::write(&changes, vec![2; 2 * PAGE]).unwrap();
        assert!(matches!(merge(&changes, &base), Err(MergeError::Sizes { changes: 8192, base: 4096, .. })));
        assert_eq!(std::fs::read(&base).unwrap(), vec![1; PAGE]);
    }
}
