//! Creates scratch disks: empty ext4 file systems, written in a few blocks whatever their size.

use std::path::Path;

use super::partial::Partial;
use super::{Error, is_full};
use crate::ext4::{self, Attributes, Identity, Mode, Tree, Writer};

/// The smallest scratch disk, in bytes.
pub const SMALLEST_SCRATCH: u64 = 1 << 20;
/// The largest: block numbers have 32 bits.
const LARGEST: u64 = (u32::MAX as u64) * ext4::BLOCK as u64;

/// Creates a private, writable ext4 with /upper, /work and /plain: sparse, complete or not at all.
///
/// Its size is `bytes`, rounded down to whole blocks. Not synced: a scratch disk that a crash of the machine takes is
/// one whose VM it took, too.
pub fn create_scratch(path: &Path, bytes: u64) -> Result<(), Error> {
    if !(SMALLEST_SCRATCH..=LARGEST).contains(&bytes) {
        return Err(Error::Size { bytes, smallest: SMALLEST_SCRATCH, largest: LARGEST });
    }
    let failed = |source| {
        let path = path.to_owned();
        if is_full(&source) { Error::DiskFull { path, source } } else { Error::Create { path, source } }
    };
    let partial = Partial::create(path).map_err(failed)?;
    let file = partial.file().try_clone().map_err(failed)?;
    let finished = Writer::new(file, bytes).finish(&tree(), &IDENTITY, Mode::Writable { bytes });
    match finished {
        Ok(_) => partial.commit_unsynced().map_err(failed),
        Err(ext4::Error::Io(source)) => Err(failed(source)),
        Err(ext4::Error::Full { .. }) => {
            Err(Error::Size { bytes, smallest: SMALLEST_SCRATCH, largest: LARGEST })
        }
    }
}

/// All scratch disks are alike; no guest sees two of them.
const IDENTITY: Identity = Identity {
    uuid: *b"imp-sc\x80-\x80tchdisk",
    hash_seed: [0x6d69_7020, 0x7363_7261, 0x7463_6820, 0x6469_736b],
};

fn tree() -> Tree {
    let directory = Attributes { permissions: 0o755, ..Attributes::default() };
    let mut tree = Tree::new(directory.clone());
    for name in [b"upper".as_slice(), b"work", b"plain"] {
        let node = tree.add_directory(directory.clone(), Tree::ROOT);
        tree.place(Tree::ROOT, name, node, 0);
    }
    tree
}
