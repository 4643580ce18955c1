//! Content of a file on its way from the disk: small files through the page cache, large ones past it.
//!
//! As for a copy the other way (`content`), the cache costs more than the disk, and what is copied out once would push out
//! what the guest's programs have in it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use rustix::io::Errno;

use super::CHUNK;
use super::direct::{ALIGNMENT, Direct};
use super::memory::Memory;

/// Bytes that are read at once: whole chunks, and no more than a virtio disk takes in one request.
const PIECE: usize = 5 * CHUNK;

/// Memories that wait for their next use.
const MOST_SPARE: usize = 2;

/// Memory of pieces that nobody holds any more, for the next ones: fresh memory costs a fault and a clearing for each page,
/// more than the disk does.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spare(Arc<Mutex<Vec<Memory>>>);

impl Spare {
    fn take(&self, bytes: usize) -> Result<Memory, Errno> {
        let spare = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.filter(|memory| memory.length() >= bytes).map_or_else(|| Memory::new(bytes), Ok)
    }

    fn give_back(&self, memory: Memory) {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < MOST_SPARE {
            spare.push(memory);
        }
    }
}

/// A piece while somebody holds it.
struct Lent {
    /// None when it is given back.
    memory: Option<Memory>,
    length: usize,
    spare: Spare,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().and_then(|memory| memory.bytes().get(..self.length)).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.spare.give_back(memory);
        }
    }
}

/// A file that is read from where it stands.
#[derive(Debug)]
pub(crate) struct Pieces {
    file: Direct,
    spare: Spare,
}

impl Pieces {
    /// `position`: where the file stands. `size`: what is expected behind that.
    pub(crate) fn new(file: OwnedFd, position: u64, size: u64, spare: Spare) -> Self {
        let mut file = Direct::new(file);
        if size >= PIECE as u64 && position.is_multiple_of(ALIGNMENT as u64) {
            file.start();
        }
        Self { file, spare }
    }

    /// At most `most` bytes; none at the end.
    pub(crate) fn next(&mut self, most: u64) -> Result<Bytes, Errno> {
        // A small file must not cost the memory of a large one.
        let piece = if self.file.is_direct() { PIECE } else { CHUNK };
        let wanted = usize::try_from(most).unwrap_or(usize::MAX).min(piece);
        if wanted == 0 {
            return Ok(Bytes::new());
        }
        let mut memory = self.spare.take(wanted)?;
        let count = loop {
            let most = if self.file.is_direct() { wanted.next_multiple_of(ALIGNMENT) } else { wanted };
            match rustix::io::read(&self.file, memory.bytes_mut().get_mut(..most).unwrap_or_default()) {
                Ok(count) => break count,
                Err(error) => self.file.refused(error)?,
            }
        };
        // Behind the end nothing is aligned any more, should the file grow.
        if !count.is_multiple_of(ALIGNMENT) {
            self.file.stop()?;
        }
        let length = count.min(wanted);
        Ok(Bytes::from_owner(Lent { memory: Some(memory), length, spare: self.spare.clone() }))
    }
}

/// What is sent in one message, each with all that may be in one.
pub(crate) fn chunks(mut piece: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let count = piece.len().min(CHUNK);
        (count > 0).then(|| piece.split_to(count))
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    fn read(path: &tempfile::NamedTempFile, from: u64, most: u64) -> Vec<u8> {
        let mut file = path.reopen().unwrap();
        let size = file.metadata().unwrap().len() - from;
        file.seek(SeekFrom::Start(from)).unwrap();
        let mut pieces = Pieces::new(file.into(), from, size.min(most), Spare::default());
        let mut all = Vec::new();
        loop {
            let piece = pieces.next(most - all.len() as u64).unwrap();
            if piece.is_empty() {
                return all;
            }
            for chunk in chunks(piece) {
                assert!(chunk.len() <= CHUNK);
                all.extend_from_slice(&chunk);
            }
        }
    }

    #[test]
    fn files_of_any_size_are_read_whole_or_as_far_as_wanted() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..2 * PIECE + 12_345).map(|at| (at % 251) as u8).collect();
        let mut written = 0;
        for length in [0, 1, 4096, CHUNK, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, content.len()] {
            file.write_all(&content[written..length]).unwrap();
            written = length;
            assert!(read(&file, 0, u64::MAX) == content[..length], "{length} bytes");
        }
        for (from, most) in [(0, 5), (1, 5), (4096, PIECE + 7), (100, 2 * PIECE), (0, 2 * PIECE)] {
            assert!(read(&file, from as u64, most as u64) == content[from..from + most], "{from}, {most}");
        }
    }

    #[test]
    fn what_is_put_behind_the_end_is_read_too() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![1; PIECE + 10]).unwrap();
        let mut pieces = Pieces::new(file.reopen().unwrap().into(), 0, PIECE as u64 + 10, Spare::default());
        let mut left = PIECE + 10;
        while left > 0 {
            left -= pieces.next(u64::MAX).unwrap().len();
        }
        file.write_all(b"more").unwrap();
        assert_eq!(&pieces.next(u64::MAX).unwrap()[..], b"more");
        assert_eq!(pieces.next(u64::MAX).unwrap().len(), 0);
    }

    #[test]
    fn a_small_file_takes_little_memory_however_much_is_asked_of_it() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"x").unwrap();
        let spare = Spare::default();
        let mut pieces = Pieces::new(file.reopen().unwrap().into(), 0, 1, spare.clone());
        assert_eq!(&pieces.next(u64::MAX).unwrap()[..], b"x");
        let lengths: Vec<_> = spare.0.lock().unwrap().iter().map(Memory::length).collect();
        assert_eq!(lengths, [CHUNK]);
    }
}
