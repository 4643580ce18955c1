//! The superblock: which features a file system has and how large its parts are.

use super::bytes::{low32, put, put8, put16, put32};
use super::checksum::seal_superblock;
use super::{BLOCKS_PER_GROUP, FIRST_INODE, INODE_BYTES};

pub(super) const BYTES: usize = 1024;

// No backups of superblock and descriptors: a base is made again, a scratch disk lives no longer than its VM.
const COMPATIBLE: u32 = EXT_ATTR | DIR_INDEX | SPARSE_SUPER2;
const EXT_ATTR: u32 = 0x8;
const DIR_INDEX: u32 = 0x20;
const SPARSE_SUPER2: u32 = 0x200;

const INCOMPATIBLE: u32 = FILETYPE | EXTENTS | FLEX_BG;
const FILETYPE: u32 = 0x2;
const EXTENTS: u32 = 0x40;
/// Bitmaps and inode tables lie anywhere, here behind the data.
const FLEX_BG: u32 = 0x200;

const READ_ONLY_COMPATIBLE: u32 =
    SPARSE_SUPER | LARGE_FILE | HUGE_FILE | DIR_NLINK | EXTRA_ISIZE | METADATA_CSUM;
const SPARSE_SUPER: u32 = 0x1;
const LARGE_FILE: u32 = 0x2;
const HUGE_FILE: u32 = 0x8;
const DIR_NLINK: u32 = 0x20;
const EXTRA_ISIZE: u32 = 0x40;
const METADATA_CSUM: u32 = 0x400;
/// The kernel refuses to mount it writable.
const READONLY: u32 = 0x1000;

pub(super) struct Superblock {
    pub(super) uuid: [u8; 16],
    pub(super) hash_seed: [u32; 4],
    pub(super) blocks: u64,
    pub(super) free_blocks: u64,
    pub(super) inodes: u32,
    pub(super) free_inodes: u32,
    pub(super) inodes_per_group: u32,
    pub(super) read_only: bool,
}

impl Superblock {
    pub(super) fn record(&self) -> [u8; BYTES] {
        let mut record = [0; BYTES];
        let block = &mut record;
        put32(block, 0x00, self.inodes);
        put32(block, 0x04, low32(self.blocks));
        put32(block, 0x0c, low32(self.free_blocks));
        put32(block, 0x10, self.free_inodes);
        put32(block, 0x18, 2); // blocks of 1024 << 2 bytes
        put32(block, 0x1c, 2);
        put32(block, 0x20, BLOCKS_PER_GROUP as u32);
        put32(block, 0x24, BLOCKS_PER_GROUP as u32);
        put32(block, 0x28, self.inodes_per_group);
        put16(block, 0x36, u16::MAX); // no check after some number of mounts
        put16(block, 0x38, 0xef53);
        put16(block, 0x3a, 1); // cleanly unmounted
        put16(block, 0x3c, 1); // go on after errors
        put32(block, 0x4c, 1); // inodes are not of the old fixed size
        put32(block, 0x54, FIRST_INODE);
        put16(block, 0x58, INODE_BYTES as u16);
        put32(block, 0x5c, COMPATIBLE);
        put32(block, 0x60, INCOMPATIBLE);
        put32(block, 0x64, READ_ONLY_COMPATIBLE | if self.read_only { READONLY } else { 0 });
        put(block, 0x68, &self.uuid);
        for (position, word) in self.hash_seed.iter().enumerate() {
            put32(block, 0xec + position * 4, *word);
        }
        put8(block, 0xfc, 1); // half MD4
        put32(block, 0x100, 0xc); // user xattrs and ACLs
        put16(block, 0x15c, 32);
        put16(block, 0x15e, 32);
        put32(block, 0x160, 2); // hashes are of unsigned characters
        put8(block, 0x174, 4); // 16 groups share one place for their metadata when the kernel allocates
        put8(block, 0x175, 1); // CRC-32C
        seal_superblock(block);
        record
    }
}
