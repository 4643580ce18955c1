//! Which parts of a file's content need no blocks, and how blocks become a hole of the disk's own file.

use std::fs::File;
use std::io;

use rustix::fs::{FallocateFlags, fallocate};

use super::allocator::Run;
use super::{BLOCK, BLOCK_BYTES};

/// Zero blocks in a row, within what is looked at together, that become a hole.
const HOLE_BLOCKS: usize = 16;

/// A part of a file's content. All parts but the last are whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stretch<'a> {
    Data(&'a [u8]),
    Hole { bytes: usize },
}

impl Stretch<'_> {
    pub(super) fn blocks(self) -> u64 {
        let bytes = match self {
            Self::Data(bytes) => bytes.len(),
            Self::Hole { bytes } => bytes,
        };
        bytes.div_ceil(BLOCK) as u64
    }
}

/// Splits content into what is written and what is a hole.
pub(super) fn stretches(content: &[u8]) -> Vec<Stretch<'_>> {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    let mut stretches = Vec::new();
    // The end of what is split, and the zeros ahead of where we are.
    let (mut split, mut zeros) = (0, 0);
    let mut hole_at = |at: usize, zeros: usize| {
        if zeros >= HOLE_BLOCKS * BLOCK {
            stretches
                .extend(content.get(split..at - zeros).filter(|data| !data.is_empty()).map(Stretch::Data));
            stretches.push(Stretch::Hole { bytes: zeros });
            split = at;
        }
    };
    let mut at = 0;
    for block in content.chunks(BLOCK) {
        if ZEROS.starts_with(block) {
            zeros += block.len();
        } else {
            hole_at(at, zeros);
            zeros = 0;
        }
        at += block.len();
    }
    hole_at(at, zeros);
    stretches.extend(content.get(split..).filter(|data| !data.is_empty()).map(Stretch::Data));
    stretches
}

/// What hidden files left in blocks that nothing took over goes away, so that equal inputs give equal bytes.
pub(super) fn punch(file: &File, run: Run) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(file, flags, run.start * BLOCK_BYTES, run.blocks * BLOCK_BYTES) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            use std::os::unix::fs::FileExt;
            (run.start..run.start + run.blocks)
                .try_for_each(|block| file.write_all_at(&[0; BLOCK], block * BLOCK_BYTES))
        }
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_stretches_of_whole_zero_blocks_become_holes() {
        let (data, zeros) = (vec![1; BLOCK], vec![0; HOLE_BLOCKS * BLOCK]);
        let hole = |bytes| Stretch::Hole { bytes };
        assert_eq!(stretches(&[]), []);
        assert_eq!(stretches(&zeros), [hole(zeros.len())]);
        let short = [&data[..], &zeros[BLOCK..], &data[..]].concat();
        assert_eq!(stretches(&short), [Stretch::Data(&short)]);
        let middle = [&data[..], &zeros[..], &data[..]].concat();
        assert_eq!(stretches(&middle), [Stretch::Data(&data), hole(zeros.len()), Stretch::Data(&data)]);
        let end = [&data[..], &zeros[..], &[0; 5][..]].concat();
        assert_eq!(stretches(&end), [Stretch::Data(&data), hole(zeros.len() + 5)]);
        assert_eq!(stretches(&end).iter().map(|stretch| stretch.blocks()).sum::<u64>(), 18);
    }
}
