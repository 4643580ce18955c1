//! Snapshots of machines that are made of one: only what has changed since is written while they stand still, and put over
//! a copy of the rest while they run again.
//!
//! ```text
//! pause ─► changes written ─► resume          the machine
//!               └─► memory of its own snapshot, copied ─► changes put over it ─► the memory of the new one
//! ```

use std::path::{Path, PathBuf};

use imp_storage::blob::digest::Digest;

use crate::ledger::{Origin, Record};
use crate::vmm::Changes;
use crate::vmm::snapshot::{MergeError, SnapshotFiles, SnapshotKind, merge};

/// Where changes are, beside the memory that they belong over.
const CHANGES: &str = "changes";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the memory that a machine began with cannot be copied")]
    Copy(#[source] imp_storage::disk::Error),
    #[error("what has changed in a machine's memory cannot be put over a copy of what it began with")]
    Merge(#[from] MergeError),
}

/// Whether a machine's changes are to be noted, by a VMM that can write these kinds of snapshots. A machine that boots fills
/// most of its memory itself.
pub(crate) fn noted(origin: &Origin, kinds: &[SnapshotKind]) -> Changes {
    match origin {
        Origin::Snapshot { .. } if kinds.contains(&SnapshotKind::Changes) => Changes::Noted,
        Origin::Snapshot { .. } | Origin::Boot => Changes::NotNoted,
    }
}

/// Over the memory of which snapshot the changes of this machine belong; none: all of its memory is written.
pub(crate) fn base(record: &Record) -> Option<Digest> {
    match (&record.origin, record.changes) {
        (Origin::Snapshot { digest }, Changes::Noted) => Some(*digest),
        (Origin::Snapshot { .. }, Changes::NotNoted) | (Origin::Boot, _) => None,
    }
}

/// What is to be written of this machine, and where, for a snapshot of these files.
pub(crate) fn written(record: &Record, files: &SnapshotFiles) -> (SnapshotKind, SnapshotFiles) {
    match base(record) {
        None => (SnapshotKind::Full, files.clone()),
        Some(_) => {
            let memory = beside(&files.memory);
            (SnapshotKind::Changes, SnapshotFiles { memory, state: files.state.clone() })
        }
    }
}

/// Makes `memory` out of `base` and the changes beside it.
pub(crate) fn complete(memory: &Path, base: &Path) -> Result<(), Error> {
    imp_storage::disk::clone_scratch(base, memory).map_err(Error::Copy)?;
    Ok(merge(&beside(memory), memory)?)
}

fn beside(memory: &Path) -> PathBuf {
    memory.with_file_name(CHANGES)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    fn made_of_a_snapshot() -> Origin {
        Origin::Snapshot { digest: Digest::of(b"snapshot") }
    }

    #[test]
    fn changes_are_noted_where_memory_is_a_snapshot_s_to_begin_with_and_the_vmm_writes_them() {
        let (all, whole) = ([SnapshotKind::Full, SnapshotKind::Changes], [SnapshotKind::Full]);
        assert_eq!(noted(&made_of_a_snapshot(), &all), Changes::Noted);
        assert_eq!(noted(&made_of_a_snapshot(), &whole), Changes::NotNoted);
        assert_eq!(noted(&Origin::Boot, &all), Changes::NotNoted);
    }

    #[test]
    fn the_memory_of_a_snapshot_is_its_base_with_the_changes_over_it_and_the_base_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (base, memory) = (directory.path().join("base"), directory.path().join("memory"));
        std::fs::write(&base, [1; 3 * 4096]).unwrap();
        let changes = File::create(beside(&memory)).unwrap();
        changes.set_len(3 * 4096).unwrap();
        changes.write_all_at(&[2; 4096], 4096).unwrap();
        complete(&memory, &base).unwrap();
        let expected = [[1; 4096], [2; 4096], [1; 4096]].concat();
        assert_eq!(std::fs::read(&memory).unwrap(), expected);
        assert_eq!(std::fs::read(&base).unwrap(), [1; 3 * 4096]);
    }
}
