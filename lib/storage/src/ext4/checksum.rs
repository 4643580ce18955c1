//! The `metadata_csum` checksums: CRC-32C without the usual final inversion, seeded with the file system's UUID.

use super::bytes::{prefix, put, put16, put32};
use super::{BLOCK, bytes::high16, bytes::low16};

/// The running value over everything that a checksum covers.
#[derive(Clone, Copy)]
pub(super) struct Checksum(u32);

impl Checksum {
    pub(super) const START: Self = Self(!0);

    pub(super) fn over(self, bytes: &[u8]) -> Self {
        Self(!crc32c::crc32c_append(!self.0, bytes))
    }

    pub(super) fn over32(self, value: u32) -> Self {
        self.over(&value.to_le_bytes())
    }

    pub(super) fn value(self) -> u32 {
        self.0
    }

    pub(super) fn of_uuid(uuid: &[u8; 16]) -> Self {
        Self::START.over(uuid)
    }

    /// The seed of everything that belongs to inode `number`, whose generation is 0.
    pub(super) fn of_inode(self, number: u32) -> Self {
        self.over32(number).over32(0)
    }
}

pub(super) fn seal_superblock(superblock: &mut [u8]) {
    let sum = Checksum::START.over(prefix(superblock, 0x3fc));
    put32(superblock, 0x3fc, sum.value());
}

pub(super) fn seal_descriptor(seed: Checksum, group: u32, descriptor: &mut [u8]) {
    put16(descriptor, 0x1e, 0);
    let sum = seed.over32(group).over(descriptor);
    put16(descriptor, 0x1e, low16(sum.value()));
}

/// `inode_seed` is [`Checksum::of_inode`] of the inode itself.
pub(super) fn seal_inode(inode_seed: Checksum, inode: &mut [u8]) {
    put16(inode, 0x7c, 0);
    put16(inode, 0x82, 0);
    let sum = inode_seed.over(inode).value();
    put16(inode, 0x7c, low16(sum));
    put16(inode, 0x82, high16(sum));
}

pub(super) fn seal_extent_block(inode_seed: Checksum, block: &mut [u8]) {
    let sum = inode_seed.over(prefix(block, BLOCK - 4));
    put32(block, BLOCK - 4, sum.value());
}

/// A block of names ends in a record that looks like an unused entry and holds the checksum.
pub(super) fn seal_directory_leaf(inode_seed: Checksum, block: &mut [u8]) {
    let sum = inode_seed.over(prefix(block, BLOCK - 12));
    put(block, BLOCK - 12, &[0, 0, 0, 0, 12, 0, 0, 0xde]);
    put32(block, BLOCK - 4, sum.value());
}

/// `covered` is where the last used index entry ends.
pub(super) fn seal_directory_index(inode_seed: Checksum, block: &mut [u8], covered: usize) {
    let sum = inode_seed.over(prefix(block, covered)).over(&[0; 8]);
    put32(block, BLOCK - 4, sum.value());
}

pub(super) fn seal_xattr_block(seed: Checksum, location: u64, block: &mut [u8]) {
    put32(block, 0x10, 0);
    let sum = seed.over(&location.to_le_bytes()).over(block);
    put32(block, 0x10, sum.value());
}
