//! The 256-byte inode record.

use super::bytes::{high16, high32, low16, low32, put, put16, put32};
use super::checksum::{Checksum, seal_inode};
use super::directory::FileType;
use super::tree::{Content, DeviceKind, Node, Timestamp};
use super::xattrs::{self, IN_INODE_OFFSET};
use super::{BLOCK_BYTES, INODE_BYTES, MOST_LINKS};

const EXTENTS_FLAG: u32 = 0x8_0000;
const INDEX_FLAG: u32 = 0x1000;
/// A target shorter than this is kept in the inode.
const INLINE_TARGET: usize = 60;

/// What an inode refers to outside itself, once it has its place.
#[derive(Default)]
pub(super) struct Placed {
    /// The root of the extent tree; nothing for what has no blocks by nature.
    pub(super) extent_root: Option<Box<[u8; 60]>>,
    pub(super) xattr_block: Option<u32>,
    /// Blocks of all kinds.
    pub(super) blocks: u64,
    /// Bytes of a directory or the like; files know their size themselves.
    pub(super) size: u64,
    pub(super) indexed: bool,
    /// Directories within a directory.
    pub(super) subdirectories: u32,
}

pub(super) fn is_inline(target: &[u8]) -> bool {
    target.len() < INLINE_TARGET
}

pub(super) fn file_type(content: &Content) -> FileType {
    match content {
        Content::Directory(_) => FileType::Directory,
        Content::File { .. } => FileType::Regular,
        Content::Symlink(_) => FileType::Symlink,
        Content::Device { kind: DeviceKind::Character, .. } => FileType::Character,
        Content::Device { kind: DeviceKind::Block, .. } => FileType::Block,
        Content::Fifo => FileType::Fifo,
        Content::Socket => FileType::Socket,
    }
}

pub(super) fn record(number: u32, node: &Node, placed: &Placed, seed: Checksum) -> [u8; INODE_BYTES] {
    let mut inode = [0; INODE_BYTES];
    let attributes = &node.attributes;
    let (format, size) = format_and_size(&node.content, placed);
    put16(&mut inode, 0x00, format | (attributes.permissions & 0o7777));
    put16(&mut inode, 0x02, low16(attributes.uid));
    put16(&mut inode, 0x78, high16(attributes.uid));
    put16(&mut inode, 0x18, low16(attributes.gid));
    put16(&mut inode, 0x7a, high16(attributes.gid));
    put32(&mut inode, 0x04, low32(size));
    put32(&mut inode, 0x6c, high32(size));
    let (seconds, extra) = time(attributes.modified);
    for (low, high) in [(0x08, 0x8c), (0x0c, 0x84), (0x10, 0x88), (0x90, 0x94)] {
        put32(&mut inode, low, seconds);
        put32(&mut inode, high, extra);
    }
    put16(&mut inode, 0x1a, links(node, placed));
    let sectors = placed.blocks * (BLOCK_BYTES / 512);
    put32(&mut inode, 0x1c, low32(sectors));
    put16(&mut inode, 0x74, low16(high32(sectors)));
    put_content(&mut inode, &node.content, placed);
    put32(&mut inode, 0x68, placed.xattr_block.unwrap_or(0));
    put16(&mut inode, 0x80, (IN_INODE_OFFSET - 128) as u16);
    xattrs::place(&attributes.xattrs).put_in_inode(&mut inode);
    seal_inode(seed.of_inode(number), &mut inode);
    inode
}

fn format_and_size(content: &Content, placed: &Placed) -> (u16, u64) {
    match content {
        Content::Directory(_) => (0o040_000, placed.size),
        Content::File { size, .. } => (0o100_000, *size),
        Content::Symlink(target) => (0o120_000, target.len() as u64),
        Content::Device { kind: DeviceKind::Character, .. } => (0o020_000, 0),
        Content::Device { kind: DeviceKind::Block, .. } => (0o060_000, 0),
        Content::Fifo => (0o010_000, 0),
        Content::Socket => (0o140_000, 0),
    }
}

fn put_content(inode: &mut [u8], content: &Content, placed: &Placed) {
    let index = if placed.indexed { INDEX_FLAG } else { 0 };
    match (content, &placed.extent_root) {
        (Content::Device { major, minor, .. }, _) => {
            if *major < 256 && *minor < 256 {
                put32(inode, 0x28, (major << 8) | minor);
            } else {
                put32(inode, 0x2c, (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12));
            }
        }
        (Content::Symlink(target), None) => put(inode, 0x28, target),
        (_, Some(root)) => {
            put32(inode, 0x20, EXTENTS_FLAG | index);
            put(inode, 0x28, root.as_slice());
        }
        (Content::Directory(_) | Content::File { .. } | Content::Fifo | Content::Socket, None) => {}
    }
}

fn links(node: &Node, placed: &Placed) -> u16 {
    let links = match &node.content {
        Content::Directory(_) => 2 + placed.subdirectories,
        Content::File { .. }
        | Content::Symlink(_)
        | Content::Device { .. }
        | Content::Fifo
        | Content::Socket => node.names,
    };
    // A directory with more says 1: "not counted".
    if links >= MOST_LINKS { 1 } else { low16(links) }
}

/// Seconds since 1970 in 34 bits from -2^31 on, and nanoseconds; times outside become the nearest.
fn time(time: Timestamp) -> (u32, u32) {
    const EARLIEST: i64 = i32::MIN as i64;
    const LATEST: i64 = EARLIEST + (1 << 34) - 1;
    let seconds = time.seconds.clamp(EARLIEST, LATEST);
    let epoch = ((seconds - EARLIEST) >> 32) as u32;
    let low = (seconds & 0xffff_ffff) as u32;
    (low, epoch | (time.nanoseconds << 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_use_the_two_extra_bits_of_seconds() {
        let at = |seconds, nanoseconds| time(Timestamp { seconds, nanoseconds });
        assert_eq!(at(0, 0), (0, 0));
        assert_eq!(at(-1, 999_999_999), (0xffff_ffff, 999_999_999 << 2));
        assert_eq!(at(i64::from(i32::MAX) + 1, 0), (0x8000_0000, 1));
        assert_eq!(at(i64::MAX, 0), (0x7fff_ffff, 3), "the last second there is");
        assert_eq!(at(i64::MIN, 0), (0x8000_0000, 0));
    }
}
