//! Extended attributes: beside the inode's fields where they fit, else in one block of their own.

use super::bytes::{put, put8, put16, put32};
use super::{BLOCK, INODE_BYTES};

/// A full name such as `user.comment` and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xattr {
    pub name: Box<[u8]>,
    pub value: Box<[u8]>,
}

/// Where attributes start inside an inode: behind 128 bytes of old and 32 of new fields.
pub(super) const IN_INODE_OFFSET: usize = 160;
const MAGIC: u32 = 0xea02_0000;
/// Room for entries and values in the inode, behind the magic number.
const INODE_ROOM: usize = INODE_BYTES - IN_INODE_OFFSET - 4;
const BLOCK_HEADER: usize = 32;
const ENTRY: usize = 16;
/// Four zero bytes end the list of entries.
const END: usize = 4;

/// Attributes split between inode and block, each in the order in which they are written.
pub(super) struct Placed<'a> {
    inode: Vec<Stored<'a>>,
    block: Vec<Stored<'a>>,
}

/// An attribute as stored: its prefix is a number.
#[derive(Clone, Copy)]
struct Stored<'a> {
    prefix: u8,
    name: &'a [u8],
    value: &'a [u8],
}

impl Stored<'_> {
    fn bytes(&self) -> usize {
        ENTRY + self.name.len().next_multiple_of(4) + self.value.len().next_multiple_of(4)
    }

    /// The hash that the kernel checks for attributes in a block (`ext4_xattr_hash_entry`).
    fn hash(&self) -> u32 {
        let name = self.name.iter().fold(0_u32, |hash, byte| hash.rotate_left(5) ^ u32::from(*byte));
        self.value.chunks(4).fold(name, |hash, chunk| {
            let mut word = [0; 4];
            put(&mut word, 0, chunk);
            hash.rotate_left(16) ^ u32::from_le_bytes(word)
        })
    }
}

/// Whether an attribute of this name has a place in ext4 at all.
pub fn storable(name: &[u8]) -> bool {
    split(name).is_some_and(|(_, rest)| rest.len() <= 255)
}

/// Whether one file can have all of `xattrs`.
pub fn fit(xattrs: &[Xattr]) -> bool {
    place(xattrs).block.iter().map(Stored::bytes).sum::<usize>() + BLOCK_HEADER + END <= BLOCK
}

/// The prefix's number and the rest of the name.
fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    match name {
        b"system.posix_acl_access" => return Some((2, b"")),
        b"system.posix_acl_default" => return Some((3, b"")),
        _ => {}
    }
    [(1, b"user.".as_slice()), (4, b"trusted."), (6, b"security.")]
        .into_iter()
        .find_map(|(number, prefix)| Some((number, name.strip_prefix(prefix)?)))
        .filter(|(_, rest)| !rest.is_empty())
}

pub(super) fn place(xattrs: &[Xattr]) -> Placed<'_> {
    let mut all: Vec<Stored<'_>> = xattrs
        .iter()
        .filter_map(|xattr| {
            let (prefix, name) = split(&xattr.name)?;
            Some(Stored { prefix, name, value: &xattr.value })
        })
        .collect();
    // The order that the kernel's search in a block relies on.
    all.sort_by_key(|stored| (stored.prefix, stored.name.len(), stored.name));
    let mut room = INODE_ROOM - END;
    let (inode, block) = all.into_iter().partition(|stored| {
        let fits = stored.bytes() <= room;
        if fits {
            room -= stored.bytes();
        }
        fits
    });
    Placed { inode, block }
}

impl Placed<'_> {
    pub(super) fn needs_block(&self) -> bool {
        !self.block.is_empty()
    }

    pub(super) fn put_in_inode(&self, inode: &mut [u8]) {
        if self.inode.is_empty() {
            return;
        }
        put32(inode, IN_INODE_OFFSET, MAGIC);
        let entries = IN_INODE_OFFSET + 4;
        put_entries(inode, &self.inode, entries, entries);
    }

    /// The block without its checksum, which depends on where it goes.
    pub(super) fn block(&self) -> Box<[u8; BLOCK]> {
        let mut block = Box::new([0; BLOCK]);
        put32(block.as_mut_slice(), 0, MAGIC);
        put32(block.as_mut_slice(), 4, 1); // one inode refers to it
        put32(block.as_mut_slice(), 8, 1); // one block
        let hash = self.block.iter().fold(0_u32, |hash, stored| hash.rotate_left(16) ^ stored.hash());
        put32(block.as_mut_slice(), 12, hash);
        put_entries(block.as_mut_slice(), &self.block, BLOCK_HEADER, 0);
        block
    }
}

/// Entries grow upward from `at`, values downward from the end; value offsets count from `origin`.
fn put_entries(record: &mut [u8], stored: &[Stored<'_>], at: usize, origin: usize) {
    let mut entry = at;
    let mut value = record.len();
    for xattr in stored {
        value -= xattr.value.len().next_multiple_of(4);
        put(record, value, xattr.value);
        put8(record, entry, u8::try_from(xattr.name.len()).expect("names were checked to be short"));
        put8(record, entry + 1, xattr.prefix);
        if !xattr.value.is_empty() {
            put16(record, entry + 2, u16::try_from(value - origin).expect("an offset inside a block"));
        }
        put32(record, entry + 8, u32::try_from(xattr.value.len()).expect("values were checked to fit"));
        put32(record, entry + 12, xattr.hash());
        put(record, entry + ENTRY, xattr.name);
        entry += ENTRY + xattr.name.len().next_multiple_of(4);
    }
}
