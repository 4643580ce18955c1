//! Writes ext4 file systems from user space: no mount, no host tree, no privileges.
//!
//! File contents stream into blocks as they arrive ([`Writer::append`]); everything that points at them (directories,
//! extent trees, inode tables, bitmaps, and last of all the superblock) follows in [`Writer::finish`], so a file cut short
//! is never taken for a file system. The on-disk format: Documentation/filesystems/ext4 of the Linux kernel.

mod allocator;
mod bytes;
mod checksum;
mod directory;
mod extents;
mod groups;
mod hash;
mod holes;
mod inode;
mod numbering;
mod output;
mod superblock;
mod tree;
mod writer;
mod xattrs;

pub use tree::{Attributes, Content, DeviceKind, Directory, Entry, Node, NodeId, Timestamp, Tree};
pub use writer::{Body, Error, Finished, Identity, Mode, Writer};
pub use xattrs::{Xattr, fit as xattrs_fit, storable as xattr_storable};

/// Bytes of a block; the only size that is written.
pub const BLOCK: usize = 4096;
/// The same for arithmetic on sizes.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// Blocks of a block group: as many as one bitmap block has bits.
const BLOCKS_PER_GROUP: u64 = 32768;
const INODE_BYTES: usize = 256;
/// The first inode that is not reserved.
const FIRST_INODE: u32 = 11;
const ROOT_INODE: u32 = 2;
/// Names of one inode; directories past it count 1 (`dir_nlink`).
pub const MOST_LINKS: u32 = 65000;
/// Bytes of one name.
pub const MOST_NAME_BYTES: usize = 255;
/// Bytes of a symbolic link's target: what the kernel follows.
pub const MOST_TARGET_BYTES: usize = 4095;
/// The largest file: block numbers within a file have 32 bits.
pub const MOST_FILE_BYTES: u64 = (u32::MAX as u64) * BLOCK_BYTES;
/// The largest device numbers that Linux has.
pub const MOST_MAJOR: u32 = (1 << 12) - 1;
pub const MOST_MINOR: u32 = (1 << 20) - 1;
