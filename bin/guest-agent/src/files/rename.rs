//! Moves files, also from one file system to another.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::error::Error;
use super::remove::remove_tree;
use crate::archive;

/// What happens to a file that has the new name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Overwrite,
    Keep,
}

pub(crate) fn rename(from: &Path, to: &Path, target: Target) -> Result<(), Error> {
    match rename_within(from, to, target) {
        Err(Errno::XDEV) => {}
        result => return result.map_err(Error::errno("cannot move", from)),
    }
    // On the other file system under a temporary name first: under its own it appears whole or not at all.
    let temporary = temporary_beside(to);
    let copied = archive::copy(from, &temporary)
        .and_then(|()| rename_within(&temporary, to, target).map_err(Error::errno("cannot move to", to)));
    if copied.is_err() {
        let _ = remove_tree(&temporary);
    }
    copied?;
    remove_tree(from)
}

fn rename_within(from: &Path, to: &Path, target: Target) -> Result<(), Errno> {
    let flags = match target {
        Target::Overwrite => RenameFlags::empty(),
        Target::Keep => RenameFlags::NOREPLACE,
    };
    renameat_with(CWD, from, CWD, to, flags)
}

/// A name in the same directory that no other call uses.
pub(crate) fn temporary_beside(path: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".imp-{}-{number}", std::process::id()))
}
