//! Content of a new file on its way to the disk: small files through the page cache, large ones past it.
//!
//! Page by page the cache costs several times what the disk does, and a large copy pushes out what the guest's programs
//! have in it. A whole piece is therefore written directly; what is left at a file's end goes through the cache. Long runs
//! of zeros can become holes, so that what was sparse stays so, however large it says it is.

use std::os::fd::OwnedFd;

use imp_sys::sparse;
use rustix::fs::{SeekFrom, ftruncate, seek};
use rustix::io::Errno;

use super::CHUNK;
use super::direct::{ALIGNMENT, Direct};
use super::memory::Memory;

/// Bytes of a piece. A file that is shorter is written through the cache, at once.
const PIECE: usize = 1 << 20;
/// Shortest run of zeros that becomes a hole; what lies between two holes is a write of its own.
const HOLE: usize = 16 * ALIGNMENT;

/// Memory for one piece, which files use one after the other.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    memory: Option<Memory>,
    filled: usize,
}

impl Piece {
    /// Room for at most `wanted` bytes, which are not none; never empty.
    fn room(&mut self, wanted: usize) -> Result<&mut [u8], Errno> {
        let memory = match self.memory.take() {
            Some(memory) if memory.length() > self.filled => memory,
            // Most files are small, and never need a whole piece.
            few => self.larger(few)?,
        };
        let memory = self.memory.insert(memory);
        let to = PIECE.min(memory.length()).min(self.filled + wanted);
        Ok(memory.bytes_mut().get_mut(self.filled..to).unwrap_or_default())
    }

    fn larger(&self, few: Option<Memory>) -> Result<Memory, Errno> {
        let Some(few) = few else { return Memory::new(1) };
        let mut whole = Memory::new(PIECE)?;
        let (to, from) = (whole.bytes_mut().get_mut(..self.filled), few.bytes().get(..self.filled));
        to.unwrap_or_default().copy_from_slice(from.unwrap_or_default());
        Ok(whole)
    }

    fn content(&self) -> &[u8] {
        self.memory.as_ref().and_then(|memory| memory.bytes().get(..self.filled)).unwrap_or_default()
    }
}

/// What becomes of long runs of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    Written,
    Holes,
}

/// A new file and what is to be written next. Only `finish` writes the end.
#[derive(Debug)]
pub(crate) struct Content {
    file: Direct,
    piece: Piece,
    zeros: Zeros,
    /// Bytes before the piece, written or holes.
    length: u64,
}

impl Content {
    /// `file` is empty.
    pub(crate) fn new(file: OwnedFd, mut piece: Piece, zeros: Zeros) -> Self {
        piece.filled = 0;
        Self { file: Direct::new(file), piece, zeros, length: 0 }
    }

    /// Where the next bytes go; never empty.
    pub(crate) fn room(&mut self) -> Result<&mut [u8], Errno> {
        self.piece.room(CHUNK)
    }

    /// The first `count` bytes of the room are the file's next ones.
    pub(crate) fn advance(&mut self, count: usize) -> Result<(), Errno> {
        self.piece.filled += count;
        if self.piece.filled < PIECE {
            return Ok(());
        }
        if self.length == 0 {
            self.file.start();
        }
        self.write_piece()
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            let room = self.piece.room(bytes.len())?;
            let count = room.len().min(bytes.len());
            let (now, rest) = bytes.split_at(count);
            room.get_mut(..count).unwrap_or_default().copy_from_slice(now);
            self.advance(count)?;
            bytes = rest;
        }
        Ok(())
    }

    /// The file with all of its content, and the memory for the next one.
    pub(crate) fn finish(mut self) -> Result<(OwnedFd, Piece), Errno> {
        self.file.stop()?;
        self.write_piece()?;
        if self.zeros == Zeros::Holes {
            // A hole at the end is not there until something says how long it is.
            ftruncate(&self.file, self.length)?;
        }
        Ok((self.file.into_file(), self.piece))
    }

    fn write_piece(&mut self) -> Result<(), Errno> {
        let mut from = 0;
        while let Some(rest) = self.piece.content().get(from..).filter(|rest| !rest.is_empty()) {
            let hole = if self.zeros == Zeros::Holes { sparse::zeros(rest, HOLE) } else { 0 };
            if hole > 0 {
                seek(&self.file, SeekFrom::Current(hole as i64))?;
                from += hole;
                continue;
            }
            let full = if self.zeros == Zeros::Holes { sparse::full(rest, HOLE) } else { rest.len() };
            self.write_all(from, from + full)?;
            from += full;
        }
        self.length += self.piece.filled as u64;
        self.piece.filled = 0;
        Ok(())
    }

    fn write_all(&mut self, mut from: usize, to: usize) -> Result<(), Errno> {
        while let Some(rest) = self.piece.content().get(from..to).filter(|rest| !rest.is_empty()) {
            match rustix::io::write(&self.file, rest) {
                Ok(count) => from += count,
                Err(error) => self.file.refused(error)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8).collect()
    }

    #[test]
    fn files_of_any_size_arrive_whole_through_one_piece() {
        let directory = tempfile::tempdir().unwrap();
        let mut piece = Piece::default();
        for length in [0, 1, 4095, CHUNK, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 12_345] {
            let path = directory.path().join(length.to_string());
            let mut content =
                Content::new(std::fs::File::create_new(&path).unwrap().into(), piece, Zeros::Written);
            let sent = pattern(length);
            for part in sent.chunks(100_003) {
                content.write(part).unwrap();
            }
            let (_, used) = content.finish().unwrap();
            piece = used;
            assert!(std::fs::read(&path).unwrap() == sent, "{length} bytes");
        }
    }
    #[test]
    fn long_runs_of_zeros_are_holes_and_content_between_them_arrives() {
        let directory = tempfile::tempdir().unwrap();
        let mut sent = vec![0; 5 * PIECE + 777];
        sent[3] = 1;
        sent[PIECE - 5..PIECE + 5].fill(2);
        sent[3 * PIECE + HOLE..][..2 * HOLE].fill(3);
        for zeros in [Zeros::Holes, Zeros::Written] {
            let path = directory.path().join(format!("{zeros:?}"));
            let file = std::fs::File::create_new(&path).unwrap();
            let mut content = Content::new(file.into(), Piece::default(), zeros);
            content.write(&sent).unwrap();
            content.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == sent, "{zeros:?}");
            let taken = std::fs::metadata(&path).unwrap().blocks() * 512;
            assert_eq!(taken <= 6 * HOLE as u64, zeros == Zeros::Holes, "{taken} bytes with {zeros:?}");
        }
    }
}
