//! A guest's memory on its way into its file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::stream::{Error, PAGE_SIZE};

/// A run of pages that is written at once.
const RUN: usize = 1 << 20;

/// In runs of pages; what has only zeros is left out.
pub(super) struct Pages<'a> {
    file: &'a File,
    pub(super) size: u64,
    /// Whether each page has come.
    seen: Vec<bool>,
    start: u64,
    run: Vec<u8>,
}

impl<'a> Pages<'a> {
    pub(super) fn new(file: &'a File, size: u64) -> Self {
        let seen = vec![false; (size / PAGE_SIZE) as usize];
        Self { file, size, seen, start: 0, run: Vec::with_capacity(RUN) }
    }

    pub(super) fn zero(&mut self, at: u64) -> Result<(), Error> {
        // One that came before may have been something else then.
        if self.note(at)? { self.add(at, &[0; PAGE_SIZE as usize]) } else { Ok(()) }
    }

    pub(super) fn write(&mut self, at: u64, page: &[u8]) -> Result<(), Error> {
        self.note(at)?;
        self.add(at, page)
    }

    /// Whether the page had come before.
    fn note(&mut self, at: u64) -> Result<bool, Error> {
        let seen = usize::try_from(at / PAGE_SIZE).ok().and_then(|page| self.seen.get_mut(page));
        let seen = seen.ok_or(Error::Form { what: "a page beyond the memory's end" })?;
        Ok(std::mem::replace(seen, true))
    }

    fn add(&mut self, at: u64, page: &[u8]) -> Result<(), Error> {
        if self.run.len() == RUN || at != self.start + self.run.len() as u64 {
            self.flush()?;
            self.start = at;
        }
        self.run.extend_from_slice(page);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.file.write_all_at(&self.run, self.start).map_err(Error::Write)?;
        self.run.clear();
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Result<(), Error> {
        self.flush()?;
        let there = self.seen.iter().filter(|seen| **seen).count() as u64 * PAGE_SIZE;
        if there == self.size { Ok(()) } else { Err(Error::Memory { there, expected: self.size }) }
    }
}
