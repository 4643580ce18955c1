//! Where the blocks of a file are: extents in memory, extent trees on disk.

use super::BLOCK;
use super::bytes::{low16, put, put16, put32};

/// Blocks of one extent on disk; one more would mean "unwritten".
const MOST_BLOCKS: u32 = 32768;
/// Records that fit in the inode itself.
const IN_INODE: usize = 4;
/// Records that fit in a block, beside header and checksum.
pub(super) const IN_BLOCK: usize = 340;
const HEADER: usize = 12;
const RECORD: usize = 12;

/// A part of a file that lies in one piece. Blocks of the file that no extent covers read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub(super) logical: u32,
    pub(super) blocks: u32,
    pub(super) physical: u32,
}

/// Adds `extent`, which lies behind all others, joining it to the last where it continues it.
pub(super) fn push(extents: &mut Vec<Extent>, extent: Extent) {
    if let Some(last) = extents.last_mut()
        && last.logical + last.blocks == extent.logical
        && last.physical + last.blocks == extent.physical
    {
        last.blocks += extent.blocks;
        return;
    }
    extents.push(extent);
}

/// The extent tree of one file, with the blocks it needs beside the inode.
pub(super) struct ExtentTree {
    /// What goes into the inode's 60 bytes.
    pub(super) root: [u8; 60],
    /// Blocks to be written, each at the position it was given.
    pub(super) blocks: Vec<(u64, Box<[u8; BLOCK]>)>,
}

/// Builds the tree of `extents`; `take_block` gives the position of each block it needs.
pub(super) fn tree<E>(
    extents: &[Extent],
    mut take_block: impl FnMut() -> Result<u64, E>,
) -> Result<ExtentTree, E> {
    let mut blocks = Vec::new();
    let mut depth = 0;
    let mut level: Vec<(u32, [u8; RECORD])> = extents.iter().flat_map(leaf_records).collect();
    while level.len() > IN_INODE {
        let mut above = Vec::with_capacity(level.len().div_ceil(IN_BLOCK));
        for records in level.chunks(IN_BLOCK) {
            let location = take_block()?;
            let mut block = Box::new([0; BLOCK]);
            put_node(block.as_mut_slice(), records, IN_BLOCK, depth);
            let first = records.first().map_or(0, |(logical, _)| *logical);
            above.push((first, index_record(first, location)));
            blocks.push((location, block));
        }
        level = above;
        depth += 1;
    }
    let mut root = [0; 60];
    put_node(&mut root, &level, IN_INODE, depth);
    Ok(ExtentTree { root, blocks })
}

fn put_node(node: &mut [u8], records: &[(u32, [u8; RECORD])], room: usize, depth: u16) {
    put16(node, 0, 0xf30a);
    put16(node, 2, low16(records.len() as u32));
    put16(node, 4, low16(room as u32));
    put16(node, 6, depth);
    for (position, (_, record)) in records.iter().enumerate() {
        put(node, HEADER + position * RECORD, record);
    }
}

fn leaf_records(extent: &Extent) -> impl Iterator<Item = (u32, [u8; RECORD])> + use<> {
    let extent = *extent;
    (0..extent.blocks).step_by(MOST_BLOCKS as usize).map(move |offset| {
        let mut record = [0; RECORD];
        put32(&mut record, 0, extent.logical + offset);
        put16(&mut record, 4, low16((extent.blocks - offset).min(MOST_BLOCKS)));
        put32(&mut record, 8, extent.physical + offset);
        (extent.logical + offset, record)
    })
}

fn index_record(logical: u32, location: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    put32(&mut record, 0, logical);
    put32(&mut record, 4, super::bytes::low32(location));
    record
}
