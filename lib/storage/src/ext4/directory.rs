//! The blocks of a directory: one block of names, or many under an index ordered by the names' hashes.

use super::bytes::{put, put8, put16, put32};
use super::checksum::{Checksum, seal_directory_index, seal_directory_leaf};
use super::hash::{NameHash, half_md4};
use super::{BLOCK, FIRST_INODE};

/// What a directory says about a name beside the inode: the `filetype` feature.
#[derive(Clone, Copy)]
pub(super) enum FileType {
    Regular = 1,
    Directory = 2,
    Character = 3,
    Block = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
}

pub(super) struct Name<'a> {
    pub(super) name: &'a [u8],
    pub(super) inode: u32,
    pub(super) kind: FileType,
}

pub(super) struct Blocks {
    /// Whole blocks, in order.
    pub(super) bytes: Vec<u8>,
    pub(super) indexed: bool,
}

/// What a directory is made of beside its names.
pub(super) struct Place {
    pub(super) own: u32,
    pub(super) parent: u32,
    pub(super) hash_seed: [u32; 4],
    /// Of the directory's inode.
    pub(super) checksum: Checksum,
}

const CHECKSUM_BYTES: usize = 12;
const LEAF: usize = BLOCK - CHECKSUM_BYTES;
const HALF_MD4: u8 = 1;
/// Where the index of the first block starts: behind ".", ".." and eight bytes about the index.
const ROOT_INDEX: usize = 32;
/// Where the index of any other index block starts: behind an unused entry's header.
const NODE_INDEX: usize = 8;
/// Index entries of a block; the last eight bytes hold the checksum.
const ROOT_ENTRIES: usize = (BLOCK - ROOT_INDEX) / 8 - 1;
const NODE_ENTRIES: usize = (BLOCK - NODE_INDEX) / 8 - 1;

/// The blocks of a directory that holds `names`.
pub(super) fn blocks(place: &Place, names: &[Name<'_>]) -> Blocks {
    debug_assert!(place.own >= FIRST_INODE || place.own == super::ROOT_INODE);
    let dots = [
        Name { name: b".", inode: place.own, kind: FileType::Directory },
        Name { name: b"..", inode: place.parent, kind: FileType::Directory },
    ];
    let room: usize = dots.iter().chain(names).map(record_bytes).sum();
    if room <= LEAF {
        return Blocks { bytes: linear(place, &dots, names), indexed: false };
    }
    let leaves = Leaves::of(place, names);
    match indexed(place, &dots, &leaves) {
        Some(bytes) => Blocks { bytes, indexed: true },
        None => Blocks { bytes: linear(place, &dots, names), indexed: false },
    }
}

fn record_bytes(name: &Name<'_>) -> usize {
    8 + name.name.len().next_multiple_of(4)
}

fn linear(place: &Place, dots: &[Name<'_>], names: &[Name<'_>]) -> Vec<u8> {
    let all: Vec<&Name<'_>> = dots.iter().chain(names).collect();
    let mut bytes = Vec::new();
    for chunk in pack(&all) {
        push_leaf(&mut bytes, place, chunk);
    }
    bytes
}

/// Splits `names` into as many as fit in a block each.
fn pack<'a, 'b>(names: &'a [&'b Name<'b>]) -> Vec<&'a [&'b Name<'b>]> {
    let mut chunks = Vec::new();
    let mut rest = names;
    while !rest.is_empty() {
        let mut room = LEAF;
        let fit = rest
            .iter()
            .take_while(|name| {
                let left = room.checked_sub(record_bytes(name));
                room = left.unwrap_or(room);
                left.is_some()
            })
            .count();
        let (chunk, after) = rest.split_at(fit);
        chunks.push(chunk);
        rest = after;
    }
    chunks
}

fn push_leaf(bytes: &mut Vec<u8>, place: &Place, names: &[&Name<'_>]) {
    let mut block = [0; BLOCK];
    let mut at = 0;
    for (position, name) in names.iter().enumerate() {
        // The last record reaches to the end of the block.
        let length = if position + 1 == names.len() { LEAF - at } else { record_bytes(name) };
        put_name(&mut block, at, name, length);
        at += length;
    }
    seal_directory_leaf(place.checksum, &mut block);
    bytes.extend_from_slice(&block);
}

fn put_name(block: &mut [u8], at: usize, name: &Name<'_>, length: usize) {
    put32(block, at, name.inode);
    put16(block, at + 4, u16::try_from(length).expect("a record inside a block"));
    put8(block, at + 6, u8::try_from(name.name.len()).expect("names were checked to be short"));
    put8(block, at + 7, name.kind as u8);
    put(block, at + 8, name.name);
}

/// Blocks of names in hash order, and the hash at which each starts.
struct Leaves {
    bytes: Vec<u8>,
    starts: Vec<u32>,
}

impl Leaves {
    fn of(place: &Place, names: &[Name<'_>]) -> Self {
        let mut ordered: Vec<(NameHash, &Name<'_>)> =
            names.iter().map(|name| (half_md4(name.name, &place.hash_seed), name)).collect();
        ordered.sort_by_key(|(hash, name)| (*hash, name.name));
        let in_order: Vec<&Name<'_>> = ordered.iter().map(|(_, name)| *name).collect();
        let mut leaves = Self { bytes: Vec::new(), starts: Vec::new() };
        let mut hashes = ordered.iter().map(|(hash, _)| hash.major);
        let mut before = None;
        for chunk in pack(&in_order) {
            let first = hashes.next().unwrap_or(0);
            // The lowest bit says that names of the same hash are in the block before, too.
            leaves.starts.push(if before == Some(first) { first | 1 } else { first });
            push_leaf(&mut leaves.bytes, place, chunk);
            before = if chunk.len() > 1 { hashes.nth(chunk.len() - 2) } else { Some(first) };
        }
        leaves
    }
}

/// Index and leaves, or nothing if two levels of index are not enough.
fn indexed(place: &Place, dots: &[Name<'_>; 2], leaves: &Leaves) -> Option<Vec<u8>> {
    let nodes =
        if leaves.starts.len() <= ROOT_ENTRIES { 0 } else { leaves.starts.len().div_ceil(NODE_ENTRIES) };
    if nodes > ROOT_ENTRIES {
        return None;
    }
    let first_leaf = 1 + nodes;
    let numbered: Vec<(u32, u32)> = leaves.starts.iter().copied().zip(count_from(first_leaf)).collect();
    let mut bytes = Vec::with_capacity(BLOCK * first_leaf + leaves.bytes.len());
    let top: Vec<(u32, u32)> = if nodes == 0 {
        numbered.clone()
    } else {
        let firsts = numbered.chunks(NODE_ENTRIES).filter_map(|chunk| chunk.first());
        firsts.map(|(hash, _)| *hash).zip(count_from(1)).collect()
    };
    bytes.extend_from_slice(&root_block(place, dots, &top, nodes > 0));
    if nodes > 0 {
        for chunk in numbered.chunks(NODE_ENTRIES) {
            let mut block = [0; BLOCK];
            put16(&mut block, 4, BLOCK as u16);
            put_index(&mut block, place, NODE_INDEX, NODE_ENTRIES, chunk);
            bytes.extend_from_slice(&block);
        }
    }
    bytes.extend_from_slice(&leaves.bytes);
    Some(bytes)
}

fn count_from(first: usize) -> impl Iterator<Item = u32> {
    u32::try_from(first).expect("a directory has less than 2^32 blocks")..
}

fn root_block(place: &Place, dots: &[Name<'_>; 2], index: &[(u32, u32)], two_levels: bool) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let [own, parent] = dots;
    put_name(&mut block, 0, own, 12);
    put_name(&mut block, 12, parent, BLOCK - 12);
    put8(&mut block, 28, HALF_MD4);
    put8(&mut block, 29, 8); // bytes of this part
    put8(&mut block, 30, u8::from(two_levels));
    put_index(&mut block, place, ROOT_INDEX, ROOT_ENTRIES, index);
    block
}

/// The first entry has room and count in place of its hash: everything below the second hash is behind it.
fn put_index(block: &mut [u8], place: &Place, at: usize, room: usize, index: &[(u32, u32)]) {
    for (position, (hash, child)) in index.iter().enumerate() {
        if position > 0 {
            put32(block, at + position * 8, *hash);
        }
        put32(block, at + position * 8 + 4, *child);
    }
    put16(block, at, u16::try_from(room).expect("a count inside a block"));
    put16(block, at + 2, u16::try_from(index.len()).expect("a count inside a block"));
    seal_directory_index(place.checksum, block, at + index.len() * 8);
}
