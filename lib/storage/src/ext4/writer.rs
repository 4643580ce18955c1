//! Streams file contents into blocks, then writes everything that points at them.

use std::fs::File;
use std::io;

use super::allocator::{Allocator, Run};
use super::bytes::{low32, put};
use super::checksum::{Checksum, seal_extent_block, seal_xattr_block};
use super::directory::{self, Name, Place};
use super::extents::{self, Extent};
use super::groups::{DESCRIPTOR_BYTES, Geometry, Group, Usage, descriptor_blocks, group_of};
use super::holes::{Stretch, punch, stretches};
use super::inode::{self, Placed};
use super::numbering::Numbered;
use super::output::Output;
use super::superblock::{self, Superblock};
use super::tree::{Content, Node, NodeId, Tree};
use super::{BLOCK, BLOCK_BYTES, xattrs};

/// How much of a file is looked at together.
const STAGE: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the file system cannot be written")]
    Io(#[from] io::Error),
    #[error("the content needs more than the {blocks} blocks that the file system may have")]
    Full { blocks: u64 },
}

/// What tells one file system from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uuid: [u8; 16],
    pub hash_seed: [u32; 4],
}

/// What a file system is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As small as its content; the kernel refuses to write to it.
    ReadOnly,
    /// Of this many bytes, with room for files to come.
    Writable { bytes: u64 },
}

/// A finished file system.
pub struct Finished {
    pub file: File,
    pub bytes: u64,
}

/// The content of one file as far as it has arrived.
pub struct Body {
    extents: Vec<Extent>,
    /// Offset in the file at which the staged bytes start, a multiple of the block size.
    base: u64,
    staged: Vec<u8>,
}

pub struct Writer {
    output: Output,
    allocator: Allocator,
    first: u64,
    most: u64,
    spare: Vec<u8>,
}

impl Writer {
    /// Writes to `file`, which is empty, a file system of at most `most_bytes`.
    pub fn new(file: File, most_bytes: u64) -> Self {
        let most = (most_bytes / BLOCK_BYTES).min(u64::from(u32::MAX));
        let first = 1 + descriptor_blocks(most);
        Self {
            output: Output::new(file),
            allocator: Allocator::new(first, most),
            first,
            most,
            spare: Vec::new(),
        }
    }

    pub fn begin(&mut self) -> Body {
        let mut staged = std::mem::take(&mut self.spare);
        staged.clear();
        Body { extents: Vec::new(), base: 0, staged }
    }

    pub fn append(&mut self, body: &mut Body, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(STAGE - body.staged.len()));
            body.staged.extend_from_slice(now);
            bytes = later;
            if body.staged.len() == STAGE {
                self.spill(body)?;
            }
        }
        Ok(())
    }

    /// Leaves a hole from where `body` is up to `offset`, which lies ahead.
    pub fn skip_to(&mut self, body: &mut Body, offset: u64) -> Result<(), Error> {
        if offset - body.base >= STAGE as u64 {
            self.spill(body)?;
            body.base = offset - offset % BLOCK_BYTES;
        }
        let zeros = usize::try_from(offset - body.base).expect("less than one stage");
        body.staged.resize(zeros, 0);
        Ok(())
    }

    /// The last of `body` has arrived.
    pub fn end(&mut self, mut body: Body) -> Result<Box<[Extent]>, Error> {
        self.spill(&mut body)?;
        self.spare = body.staged;
        Ok(body.extents.into_boxed_slice())
    }

    /// The file that has `extents` is gone: its blocks serve the next one.
    pub fn give_back(&mut self, extents: &[Extent]) {
        for extent in extents {
            let run = Run { start: extent.physical.into(), blocks: extent.blocks.into() };
            self.allocator.give_back(run);
        }
    }

    fn spill(&mut self, body: &mut Body) -> Result<(), Error> {
        let staged = std::mem::take(&mut body.staged);
        let mut logical = low32(body.base / BLOCK_BYTES);
        for stretch in stretches(&staged) {
            let blocks = stretch.blocks();
            if let Stretch::Data(bytes) = stretch {
                let run = self.allocator.take(blocks).ok_or(Error::Full { blocks: self.most })?;
                self.output.put(run.start, bytes)?;
                let extent = Extent { logical, blocks: low32(blocks), physical: low32(run.start) };
                extents::push(&mut body.extents, extent);
            }
            logical += low32(blocks);
        }
        body.base += staged.len().next_multiple_of(BLOCK) as u64;
        body.staged = staged;
        body.staged.clear();
        Ok(())
    }

    /// Writes directories, inodes, bitmaps and the superblock. The file is complete, but not synced.
    pub fn finish(mut self, tree: &Tree, identity: &Identity, mode: Mode) -> Result<Finished, Error> {
        let seed = Checksum::of_uuid(&identity.uuid);
        let numbered = Numbered::of(tree);
        let mut placed = Vec::with_capacity(numbered.order.len());
        for (id, number) in numbered.order.iter().zip(numbered.numbers()) {
            placed.push(self.place(tree, &numbered, *id, number, identity, seed)?);
        }
        let used = self.allocator.next();
        let geometry = match mode {
            Mode::ReadOnly => Geometry::smallest(used, numbered.highest().into()),
            Mode::Writable { bytes } => Geometry::of_size(used, bytes / BLOCK_BYTES),
        };
        let most = self.most;
        if geometry.blocks > most || used + geometry.metadata_blocks() > geometry.blocks {
            return Err(Error::Full { blocks: most });
        }
        let directories = self.write_inodes(tree, &numbered, &placed, &geometry, seed)?;
        let free = self.free_ranges(&geometry);
        let usage = Usage { free: &free, inodes: numbered.highest().into(), directories: &directories, seed };
        let superblock = self.write_groups(&geometry, &usage, identity, mode)?;
        self.write_first_block(&superblock)?;
        let stale: Vec<Run> = self.allocator.free_runs().collect();
        let file = self.output.into_file()?;
        let bytes = geometry.blocks * BLOCK_BYTES;
        file.set_len(bytes)?;
        for run in stale {
            punch(&file, run)?;
        }
        Ok(Finished { file, bytes })
    }

    /// Writes the blocks that one inode needs beside its record and its file content.
    fn place(
        &mut self,
        tree: &Tree,
        numbered: &Numbered,
        id: NodeId,
        number: u32,
        identity: &Identity,
        seed: Checksum,
    ) -> Result<Placed, Error> {
        let node = tree.node(id);
        let inode_seed = seed.of_inode(number);
        let mut placed = Placed::default();
        match &node.content {
            Content::Directory(content) => {
                let names: Vec<Name<'_>> = content
                    .entries
                    .iter()
                    .map(|(name, entry)| Name {
                        name,
                        inode: numbered.number(entry.node),
                        kind: inode::file_type(&tree.node(entry.node).content),
                    })
                    .collect();
                let directories =
                    names.iter().filter(|name| matches!(name.kind, directory::FileType::Directory));
                placed.subdirectories = low32(directories.count() as u64);
                let parent = numbered.number(content.parent);
                let place =
                    Place { own: number, parent, hash_seed: identity.hash_seed, checksum: inode_seed };
                let blocks = directory::blocks(&place, &names);
                placed.indexed = blocks.indexed;
                placed.size = blocks.bytes.len() as u64;
                let extent = self.put_whole(&blocks.bytes)?;
                self.place_extents(&mut placed, &[extent], inode_seed)?;
            }
            Content::File { extents, .. } => self.place_extents(&mut placed, extents, inode_seed)?,
            Content::Symlink(target) if !inode::is_inline(target) => {
                let extent = self.put_whole(target)?;
                self.place_extents(&mut placed, &[extent], inode_seed)?;
            }
            Content::Symlink(_) | Content::Device { .. } | Content::Fifo | Content::Socket => {}
        }
        let attributes = xattrs::place(&node.attributes.xattrs);
        if attributes.needs_block() {
            let run = self.take_unused(1)?;
            let mut block = attributes.block();
            seal_xattr_block(seed, run.start, block.as_mut_slice());
            self.output.put(run.start, block.as_slice())?;
            placed.xattr_block = Some(low32(run.start));
            placed.blocks += 1;
        }
        Ok(placed)
    }

    fn put_whole(&mut self, bytes: &[u8]) -> Result<Extent, Error> {
        let run = self.take_unused(bytes.len().div_ceil(BLOCK) as u64)?;
        self.output.put(run.start, bytes)?;
        Ok(Extent { logical: 0, blocks: low32(run.blocks), physical: low32(run.start) })
    }

    fn place_extents(
        &mut self,
        placed: &mut Placed,
        extents: &[Extent],
        seed: Checksum,
    ) -> Result<(), Error> {
        let tree = extents::tree(extents, || self.take_unused(1).map(|run| run.start))?;
        placed.blocks += extents.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>();
        placed.blocks += tree.blocks.len() as u64;
        for (location, mut block) in tree.blocks {
            seal_extent_block(seed, block.as_mut_slice());
            self.output.put(location, block.as_slice())?;
        }
        placed.extent_root = Some(Box::new(tree.root));
        Ok(())
    }

    /// Metadata goes to blocks never used before: in order, and zero where nothing is written.
    fn take_unused(&mut self, blocks: u64) -> Result<Run, Error> {
        self.allocator.take_unused(blocks).ok_or(Error::Full { blocks: self.most })
    }

    /// Writes the inode tables and counts the directories of each group.
    fn write_inodes(
        &mut self,
        tree: &Tree,
        numbered: &Numbered,
        placed: &[Placed],
        geometry: &Geometry,
        seed: Checksum,
    ) -> Result<Vec<u16>, Error> {
        let groups = usize::try_from(geometry.groups).expect("groups are counted in memory");
        let mut directories = vec![0_u16; groups];
        let mut block = [0; BLOCK];
        let mut current = geometry.inode_table(0);
        let ids = numbered.order.iter().zip(numbered.numbers()).zip(placed);
        for ((id, number), placed) in ids {
            let node: &Node = tree.node(*id);
            let offset = u64::from(number - 1) * super::INODE_BYTES as u64;
            let location = geometry.inode_table(0) + offset / BLOCK_BYTES;
            if location != current {
                self.output.put(current, &block)?;
                block = [0; BLOCK];
                current = location;
            }
            let within = usize::try_from(offset % BLOCK_BYTES).expect("less than a block");
            put(&mut block, within, &inode::record(number, node, placed, seed));
            if matches!(node.content, Content::Directory(_))
                && let Some(count) = directories.get_mut(group_of(geometry, number))
            {
                *count += 1;
            }
        }
        self.output.put(current, &block)?;
        Ok(directories)
    }

    /// Every block that nothing uses, by position.
    fn free_ranges(&self, geometry: &Geometry) -> Vec<(u64, u64)> {
        let unused_descriptors = (1 + descriptor_blocks(geometry.blocks), self.first);
        let behind = (geometry.metadata + geometry.metadata_blocks(), geometry.blocks);
        let between = self.allocator.free_runs().map(|run| (run.start, run.start + run.blocks));
        let all = std::iter::once(unused_descriptors).chain(between).chain([behind]);
        all.filter(|(start, end)| start < end).collect()
    }

    fn write_groups(
        &mut self,
        geometry: &Geometry,
        usage: &Usage<'_>,
        identity: &Identity,
        mode: Mode,
    ) -> Result<Superblock, Error> {
        let (mut free_blocks, mut free_inodes) = (0, 0);
        let mut descriptors = Vec::new();
        let mut inode_bitmaps = Vec::new();
        for number in 0..geometry.groups {
            let group = Group::new(geometry, number, usage);
            if let Some(bitmap) = group.block_bitmap {
                self.output.put(geometry.block_bitmap(number), &bitmap)?;
            }
            if let Some(bitmap) = group.inode_bitmap {
                inode_bitmaps.push((geometry.inode_bitmap(number), bitmap));
            }
            descriptors.extend_from_slice(group.descriptor.as_slice());
            free_blocks += group.free_blocks;
            free_inodes += group.free_inodes;
        }
        for (location, bitmap) in inode_bitmaps {
            self.output.put(location, &bitmap)?;
        }
        debug_assert_eq!(descriptors.len() as u64, geometry.groups * DESCRIPTOR_BYTES as u64);
        self.output.put(1, &descriptors)?;
        Ok(Superblock {
            uuid: identity.uuid,
            hash_seed: identity.hash_seed,
            blocks: geometry.blocks,
            free_blocks,
            inodes: low32(geometry.inodes()),
            free_inodes: low32(free_inodes),
            inodes_per_group: low32(geometry.inodes_per_group),
            read_only: mode == Mode::ReadOnly,
        })
    }

    fn write_first_block(&mut self, superblock: &Superblock) -> Result<(), Error> {
        let mut block = [0; BLOCK];
        put(&mut block, superblock::BYTES, &superblock.record());
        self.output.put(0, &block)?;
        Ok(())
    }
}
