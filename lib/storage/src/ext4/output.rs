//! Collects neighbouring blocks into large positioned writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{BLOCK, BLOCK_BYTES};

/// How much is collected before it is written.
const COLLECT: usize = 1 << 20;

pub(super) struct Output {
    file: File,
    /// The block at which the collected bytes start.
    start: u64,
    /// Whole blocks.
    collected: Vec<u8>,
}

impl Output {
    pub(super) fn new(file: File) -> Self {
        Self { file, start: 0, collected: Vec::with_capacity(COLLECT) }
    }

    /// Puts `bytes` at `block`; the rest of the last block becomes zeros.
    pub(super) fn put(&mut self, block: u64, bytes: &[u8]) -> io::Result<()> {
        let follows = self.start + (self.collected.len() / BLOCK) as u64;
        if block != follows || self.collected.len() + bytes.len() > COLLECT {
            self.flush()?;
            self.start = block;
        }
        if bytes.len() >= COLLECT && bytes.len().is_multiple_of(BLOCK) {
            self.file.write_all_at(bytes, block * BLOCK_BYTES)?;
            self.start = block + (bytes.len() / BLOCK) as u64;
            return Ok(());
        }
        self.collected.extend_from_slice(bytes);
        self.collected.resize(self.collected.len().next_multiple_of(BLOCK), 0);
        Ok(())
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.collected, self.start * BLOCK_BYTES)?;
        self.start += (self.collected.len() / BLOCK) as u64;
        self.collected.clear();
        Ok(())
    }

    /// Writes what is collected and gives the file back.
    pub(super) fn into_file(mut self) -> io::Result<File> {
        self.flush()?;
        Ok(self.file)
    }
}
