//! Block groups: how many there are, where their bitmaps and inode tables lie, and what is used in each.

use super::bytes::{low16, low32, put16, put32};
use super::checksum::{Checksum, seal_descriptor};
use super::{BLOCK, BLOCKS_PER_GROUP, FIRST_INODE, INODE_BYTES};

pub(super) const DESCRIPTOR_BYTES: usize = 32;
const DESCRIPTORS_PER_BLOCK: u64 = (BLOCK / DESCRIPTOR_BYTES) as u64;
const INODES_PER_BLOCK: u64 = (BLOCK / INODE_BYTES) as u64;
const MOST_INODES_PER_GROUP: u64 = 32768;
/// The smallest last group: less is not worth its metadata.
const SMALLEST_GROUP: u64 = 64;

const INODE_UNINIT: u16 = 0x1;
const BLOCK_UNINIT: u16 = 0x2;
const INODE_ZEROED: u16 = 0x4;

/// The sizes that decide everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) blocks: u64,
    pub(super) groups: u64,
    pub(super) inodes_per_group: u64,
    /// Where the metadata of all groups starts: block bitmaps, inode bitmaps, inode tables.
    pub(super) metadata: u64,
}

/// Blocks of descriptors for a file system of `blocks`.
pub(super) fn descriptor_blocks(blocks: u64) -> u64 {
    blocks.div_ceil(BLOCKS_PER_GROUP).div_ceil(DESCRIPTORS_PER_BLOCK)
}

impl Geometry {
    /// The smallest that holds `inodes` inodes behind `used` blocks.
    pub(super) fn smallest(used: u64, inodes: u64) -> Self {
        let mut groups = used.div_ceil(BLOCKS_PER_GROUP).max(inodes.div_ceil(MOST_INODES_PER_GROUP)).max(1);
        loop {
            let per_group = inodes.div_ceil(groups).next_multiple_of(INODES_PER_BLOCK);
            let geometry = Self { blocks: 0, groups, inodes_per_group: per_group, metadata: used };
            let needed = used + geometry.metadata_blocks();
            if needed <= groups * BLOCKS_PER_GROUP {
                let least = (groups - 1) * BLOCKS_PER_GROUP + SMALLEST_GROUP;
                return Self { blocks: needed.max(least), ..geometry };
            }
            groups += 1;
        }
    }

    /// One of `blocks` with an inode for every 16 KiB, the first `used` blocks taken.
    pub(super) fn of_size(used: u64, blocks: u64) -> Self {
        let rest = blocks % BLOCKS_PER_GROUP;
        let tiny = rest < SMALLEST_GROUP && blocks > BLOCKS_PER_GROUP;
        let blocks = if tiny { blocks - rest } else { blocks };
        let groups = blocks.div_ceil(BLOCKS_PER_GROUP);
        let inodes = (blocks / 4).max(64);
        let per_group = inodes.div_ceil(groups).next_multiple_of(INODES_PER_BLOCK);
        Self { blocks, groups, inodes_per_group: per_group, metadata: used }
    }

    pub(super) fn inodes(&self) -> u64 {
        self.groups * self.inodes_per_group
    }

    pub(super) fn metadata_blocks(&self) -> u64 {
        self.groups * (2 + self.table_blocks())
    }

    pub(super) fn block_bitmap(&self, group: u64) -> u64 {
        self.metadata + group
    }

    pub(super) fn inode_bitmap(&self, group: u64) -> u64 {
        self.metadata + self.groups + group
    }

    /// The tables follow each other, so inode N of the file system is record N - 1 from `inode_table(0)`.
    pub(super) fn inode_table(&self, group: u64) -> u64 {
        self.metadata + 2 * self.groups + group * self.table_blocks()
    }

    fn table_blocks(&self) -> u64 {
        self.inodes_per_group / INODES_PER_BLOCK
    }
}

/// One group as it goes to disk; a bitmap that a reader can derive is absent.
pub(super) struct Group {
    pub(super) block_bitmap: Option<[u8; BLOCK]>,
    pub(super) inode_bitmap: Option<[u8; BLOCK]>,
    pub(super) descriptor: [u8; DESCRIPTOR_BYTES],
    pub(super) free_blocks: u64,
    pub(super) free_inodes: u64,
}

/// What is used where; inodes are used from the first on without gaps.
pub(super) struct Usage<'a> {
    /// Unused blocks as (first, end), by position.
    pub(super) free: &'a [(u64, u64)],
    pub(super) inodes: u64,
    /// For each group, how many of its inodes are directories.
    pub(super) directories: &'a [u16],
    pub(super) seed: Checksum,
}

impl Group {
    pub(super) fn new(geometry: &Geometry, group: u64, usage: &Usage<'_>) -> Self {
        let first = group * BLOCKS_PER_GROUP;
        let end = (first + BLOCKS_PER_GROUP).min(geometry.blocks);
        let mut block_bitmap = [0xff; BLOCK];
        let mut free_blocks = 0;
        let from = usage.free.partition_point(|(_, free_end)| *free_end <= first);
        for (free_first, free_end) in usage.free.iter().skip(from).take_while(|(start, _)| *start < end) {
            let (free_first, free_end) = ((*free_first).max(first), (*free_end).min(end));
            clear_bits(&mut block_bitmap, free_first - first, free_end - first);
            free_blocks += free_end - free_first;
        }
        let per_group = geometry.inodes_per_group;
        let used_inodes = usage.inodes.saturating_sub(group * per_group).min(per_group);
        let mut inode_bitmap = [0xff; BLOCK];
        clear_bits(&mut inode_bitmap, used_inodes, per_group);
        let position = usize::try_from(group).expect("groups are counted in memory");
        let directories = usage.directories.get(position).copied().unwrap_or(0);

        // The last group may be short, which a reader of an absent bitmap need not expect.
        let last = group + 1 == geometry.groups;
        let blocks_absent = free_blocks == BLOCKS_PER_GROUP && !last;
        let inodes_absent = used_inodes == 0 && !last;
        let mut flags = INODE_ZEROED;
        flags |= if blocks_absent { BLOCK_UNINIT } else { 0 };
        flags |= if inodes_absent { INODE_UNINIT } else { 0 };

        let mut descriptor = [0; DESCRIPTOR_BYTES];
        put32(&mut descriptor, 0x00, low32(geometry.block_bitmap(group)));
        put32(&mut descriptor, 0x04, low32(geometry.inode_bitmap(group)));
        put32(&mut descriptor, 0x08, low32(geometry.inode_table(group)));
        put16(&mut descriptor, 0x0c, low16(low32(free_blocks)));
        put16(&mut descriptor, 0x0e, low16(low32(per_group - used_inodes)));
        put16(&mut descriptor, 0x10, directories);
        put16(&mut descriptor, 0x12, flags);
        if !blocks_absent {
            put16(&mut descriptor, 0x18, low16(usage.seed.over(&block_bitmap).value()));
        }
        if !inodes_absent {
            let bits = usize::try_from(per_group / 8).expect("a bitmap is a block");
            let covered = usage.seed.over(super::bytes::prefix(&inode_bitmap, bits));
            put16(&mut descriptor, 0x1a, low16(covered.value()));
        }
        put16(&mut descriptor, 0x1c, low16(low32(per_group - used_inodes)));
        let number = u32::try_from(group).expect("groups have 32 bits");
        seal_descriptor(usage.seed, number, &mut descriptor);
        Self {
            block_bitmap: (!blocks_absent).then_some(block_bitmap),
            inode_bitmap: (!inodes_absent).then_some(inode_bitmap),
            descriptor,
            free_blocks,
            free_inodes: per_group - used_inodes,
        }
    }
}

/// The group of an inode.
pub(super) fn group_of(geometry: &Geometry, inode: u32) -> usize {
    debug_assert!(inode >= FIRST_INODE || inode == super::ROOT_INODE);
    usize::try_from(u64::from(inode - 1) / geometry.inodes_per_group).expect("groups are counted in memory")
}

fn clear_bits(bitmap: &mut [u8; BLOCK], first: u64, end: u64) {
    let mut bit = first;
    while bit < end {
        let byte = usize::try_from(bit / 8).expect("a bit of one block");
        let byte = bitmap.get_mut(byte).expect("a bit of one block");
        if bit.is_multiple_of(8) && bit + 8 <= end {
            *byte = 0;
            bit += 8;
        } else {
            *byte &= !(1 << (bit % 8));
            bit += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_geometry_holds_what_was_asked_for() {
        for used in [1, 100, 32767, 32768, 32769, 1_000_000] {
            for inodes in [11, 12, 50_000, 4_000_000] {
                let geometry = Geometry::smallest(used, inodes);
                assert!(geometry.inodes() >= inodes, "{geometry:?}");
                assert!(geometry.inodes_per_group <= MOST_INODES_PER_GROUP, "{geometry:?}");
                assert!(used + geometry.metadata_blocks() <= geometry.blocks, "{geometry:?}");
                assert_eq!(geometry.blocks.div_ceil(BLOCKS_PER_GROUP), geometry.groups, "{geometry:?}");
            }
        }
    }
}
