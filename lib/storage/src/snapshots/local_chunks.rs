//! Chunks that snapshots in the store hold already, so that they need not come from elsewhere.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{copy_file_range, ioctl_ficlone};
use tempfile::tempfile_in;

use super::artifact::Wanted;
use super::error::Error;
use super::manifest::Part;
use super::{files, stored, verified};
use crate::blob::digest::Digest;
use crate::store::layout::Layout;

/// Where each chunk of the snapshots in a store is.
pub(super) struct LocalChunks {
    files: Vec<PathBuf>,
    /// Number of the file, and the offset in it.
    places: HashMap<(Digest, u64), (usize, u64)>,
    sharing: Sharing,
}

/// Whether files of the store can have blocks in common.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Blocks,
    Nothing,
}

/// The file that a chunk was read from.
pub(super) struct Place {
    file: File,
    offset: u64,
    sharing: Sharing,
}

impl LocalChunks {
    pub(super) fn of(layout: &Layout) -> Result<Self, Error> {
        let mut all =
            Self { files: Vec::new(), places: HashMap::new(), sharing: sharing(&layout.snapshots()) };
        for digest in stored::digests(layout)? {
            // One that cannot be read holds nothing.
            let Ok(manifest) = stored::manifest(layout, &digest) else { continue };
            let directory = layout.snapshot(&digest);
            for part in Part::ALL {
                let Ok(Some(index)) = verified::index(&directory, &manifest, part) else { continue };
                let number = all.files.len();
                all.files.push(files::part(&directory, part));
                for chunk in index.full() {
                    all.places.entry((chunk.digest, chunk.length)).or_insert((number, chunk.offset));
                }
            }
        }
        Ok(all)
    }

    /// The content of a chunk, verified, and where it is; None if no snapshot has it, or that one is damaged or just goes.
    pub(super) fn read(&self, wanted: &Wanted) -> Option<(Vec<u8>, Place)> {
        let (number, offset) = *self.places.get(&(wanted.digest, wanted.length))?;
        let file = File::open(self.files.get(number)?).ok()?;
        let mut content = vec![0; usize::try_from(wanted.length).ok()?];
        file.read_exact_at(&mut content, offset).ok()?;
        let is_good = Digest::of(&content) == wanted.digest;
        is_good.then_some((content, Place { file, offset, sharing: self.sharing }))
    }
}

impl Place {
    /// Makes a range of another file have this content without a copy; false if that is not to be had.
    pub(super) fn share(&self, to: &File, offset: u64, length: u64) -> bool {
        if self.sharing == Sharing::Nothing {
            return false;
        }
        let (mut from, mut to_offset, mut left) = (self.offset, offset, length);
        // Where blocks can be shared, this call shares them.
        while let Ok(count @ 1..) = copy_file_range(
            &self.file,
            Some(&mut from),
            to,
            Some(&mut to_offset),
            usize::try_from(left).unwrap_or(usize::MAX),
        ) {
            left = left.saturating_sub(count as u64);
            if left == 0 {
                return true;
            }
        }
        false
    }
}

fn sharing(directory: &Path) -> Sharing {
    let can = || {
        let (one, other) = (tempfile_in(directory).ok()?, tempfile_in(directory).ok()?);
        one.write_all_at(&[1; 4096], 0).ok()?;
        ioctl_ficlone(&other, &one).ok()
    };
    if can().is_some() { Sharing::Blocks } else { Sharing::Nothing }
}
