//! Reads a part once, by all processors, and tells what is in its chunks. Holes are not read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use imp_sys::sparse::{full, zeros};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use super::chunks::Index;
use crate::blob::digest::Hasher;

/// What is read at a time, bytes. Chunks are multiples of it.
const PIECE: usize = 256 << 10;
/// What file systems allocate, bytes.
const BLOCK: usize = 4 << 10;
/// Shorter runs of zeros are not worth a hole.
const SHORTEST_HOLE: usize = 32 << 10;
/// More threads than this wait for the disk.
const MOST_THREADS: usize = 8;

/// What becomes of zeros that take room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeros {
    Kept,
    /// They become holes; the file must be open for writing.
    Freed,
}

/// The index of a file's content. The file must not change meanwhile.
pub(super) fn index(file: &File, size: u64, on_zeros: Zeros) -> io::Result<Index> {
    let empty = Index::zero(size).map_err(io::Error::other)?;
    let numbers = allocated_chunks(file, &empty)?;
    let (next, index) = (AtomicUsize::new(0), Mutex::new(empty));
    let failure = Mutex::new(None);
    let chunk_size = index.lock().unwrap_or_else(PoisonError::into_inner).chunk_size();
    let work = || {
        let mut buffer = vec![0; PIECE];
        while let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = number * chunk_size;
            match hash(file, start, chunk_size.min(size - start), &mut buffer, on_zeros) {
                Ok(None) => {}
                Ok(Some(hasher)) => {
                    let digest = hasher.finish();
                    index.lock().unwrap_or_else(PoisonError::into_inner).set(*number, Some(digest));
                }
                Err(error) => {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    next.store(numbers.len(), Ordering::Relaxed);
                    return;
                }
            }
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 1..processors.min(MOST_THREADS).min(numbers.len()) {
            scope.spawn(work);
        }
        work();
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(index.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// Numbers of the chunks of which something is allocated.
fn allocated_chunks(file: &File, index: &Index) -> io::Result<Vec<u64>> {
    let mut numbers: Vec<u64> = Vec::new();
    let mut position = 0;
    while let Some((start, end)) = extent(file, position)? {
        let first = (start / index.chunk_size()).max(numbers.last().map_or(0, |last| last + 1));
        numbers.extend(first..end.min(index.size()).div_ceil(index.chunk_size()));
        position = end;
    }
    Ok(numbers)
}

/// The next allocated range of a file from a position on.
pub(super) fn extent(file: &File, from: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        // Behind the last data.
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some((start, seek(file, SeekFrom::Hole(start))?)))
}

/// Hashes one chunk; None if it is all zeros.
fn hash(
    file: &File,
    start: u64,
    length: u64,
    buffer: &mut [u8],
    on_zeros: Zeros,
) -> io::Result<Option<Hasher>> {
    let mut hasher: Option<Hasher> = None;
    let mut at = 0;
    while at < length {
        let count = usize::try_from(length - at).unwrap_or(usize::MAX).min(buffer.len());
        let piece = buffer.get_mut(..count).unwrap_or_default();
        file.read_exact_at(piece, start + at)?;
        match (&mut hasher, zeros(piece, BLOCK) == count) {
            (Some(hasher), _) => hasher.update(piece),
            (None, true) => {}
            (None, false) => {
                let mut new = Hasher::default();
                zeros_before(&mut new, at);
                new.update(piece);
                hasher = Some(new);
            }
        }
        if on_zeros == Zeros::Freed {
            free_zeros(file, piece, start + at)?;
        }
        at += count as u64;
    }
    Ok(hasher)
}

/// The zeros at the start of a chunk count for its digest once something follows.
fn zeros_before(hasher: &mut Hasher, mut count: u64) {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    while count > 0 {
        let part = count.min(BLOCK as u64);
        hasher.update(ZEROS.get(..part as usize).unwrap_or_default());
        count -= part;
    }
}

fn free_zeros(file: &File, piece: &[u8], offset: u64) -> io::Result<()> {
    let mut at = 0;
    while let Some(rest) = piece.get(at..).filter(|rest| !rest.is_empty()) {
        let empty = zeros(rest, BLOCK);
        if empty >= SHORTEST_HOLE {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match fallocate(file, flags, offset + at as u64, empty as u64) {
                // Zeros that stay take room, and that is all.
                Ok(()) | Err(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        at += empty;
        at += full(piece.get(at..).unwrap_or_default(), BLOCK);
    }
    Ok(())
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
