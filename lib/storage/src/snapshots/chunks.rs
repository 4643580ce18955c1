//! Chunks: the pieces in which the parts of a snapshot are hashed, compared and carried.
//!
//! A part is cut at multiples of its chunk size. The digests of its chunks, in order, are its index, 32 bytes each; a
//! chunk of zeros has 32 zero bytes there, takes no room and is carried nowhere. The digest of the index stands for the part.
//!
//! The size is a compromise. Guests scatter what they write over their memory by the page, so small chunks share more
//! between versions. But each chunk costs a request to carry, a line in an OCI manifest (which registries take up to
//! 4 MiB), and compresses alone. 256 KiB carry a request's cost many times over; parts of more than 2 GiB have larger
//! chunks, so that two of their indexes, whatever they hold, fit into one manifest.

use crate::blob::digest::{Digest, Hasher};

/// The smallest chunk, bytes.
pub const SMALLEST: u64 = 256 << 10;
/// The largest chunk, bytes: whoever carries one holds it in memory.
pub const LARGEST: u64 = 64 << 20;
/// Most chunks of a part.
pub const MOST: u64 = 8192;
/// Largest part, bytes.
pub const LARGEST_PART: u64 = LARGEST * MOST;
/// Bytes of a digest in an index.
const DIGEST: usize = 32;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("a part of {size} bytes is too large: at most {LARGEST_PART} are allowed")]
    TooLarge { size: u64 },
    #[error("a part of {size} bytes has chunks of {expected} bytes, not {found}")]
    ChunkSize { size: u64, expected: u64, found: u64 },
    #[error("the index of a part of {size} bytes has {expected} bytes, not {found}")]
    Length { size: u64, expected: u64, found: u64 },
}

/// The chunk size of a part: it follows from the part's size, so that versions of one part have the same.
pub fn size_for(part: u64) -> Result<u64, Error> {
    if part > LARGEST_PART {
        return Err(Error::TooLarge { size: part });
    }
    let mut chunk = SMALLEST;
    while part.div_ceil(chunk) > MOST {
        chunk *= 2;
    }
    Ok(chunk)
}

/// The digests of all chunks of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    size: u64,
    chunk: u64,
    /// None is a chunk of zeros.
    chunks: Vec<Option<Digest>>,
}

/// One chunk of a part that is not all zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub digest: Digest,
    /// Where it begins in the part.
    pub offset: u64,
    /// Bytes; less than the chunk size only at the end of the part.
    pub length: u64,
}

impl Index {
    /// Of a part of `size` bytes that is all zeros.
    pub fn zero(size: u64) -> Result<Self, Error> {
        let chunk = size_for(size)?;
        // At most MOST of them.
        Ok(Self { size, chunk, chunks: vec![None; size.div_ceil(chunk) as usize] })
    }

    /// Reads the index of a part of `size` bytes.
    pub fn parse(size: u64, bytes: &[u8]) -> Result<Self, Error> {
        let mut index = Self::zero(size)?;
        let (expected, found) = ((index.chunks.len() * DIGEST) as u64, bytes.len() as u64);
        if expected != found {
            return Err(Error::Length { size, expected, found });
        }
        for (chunk, bytes) in index.chunks.iter_mut().zip(bytes.chunks_exact(DIGEST)) {
            let bytes: [u8; DIGEST] = bytes.try_into().expect("chunks of this length");
            *chunk = (bytes != [0; DIGEST]).then_some(Digest::from_bytes(bytes));
        }
        Ok(index)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let zero = [0; DIGEST];
        self.chunks
            .iter()
            .flat_map(|chunk| chunk.as_ref().map_or(zero, |digest| *digest.as_bytes()))
            .collect()
    }

    /// Stands for the part.
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::default();
        hasher.update(&self.bytes());
        hasher.finish()
    }

    /// Bytes of the part.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn chunk_size(&self) -> u64 {
        self.chunk
    }

    /// Notes what the chunk with this number is; a number behind the last is ignored.
    pub fn set(&mut self, number: u64, digest: Option<Digest>) {
        if let Some(chunk) = usize::try_from(number).ok().and_then(|number| self.chunks.get_mut(number)) {
            *chunk = digest;
        }
    }

    /// The chunk with this number, unless it is all zeros or there is none.
    pub fn get(&self, number: u64) -> Option<Chunk> {
        let digest = (*self.chunks.get(usize::try_from(number).ok()?)?)?;
        let offset = number * self.chunk;
        Some(Chunk { digest, offset, length: self.chunk.min(self.size - offset) })
    }

    /// Chunks that are not all zeros, in order.
    pub fn full(&self) -> impl Iterator<Item = Chunk> + '_ {
        (0..self.chunks.len() as u64).filter_map(|number| self.get(number))
    }

    /// Positions of the chunks that differ from those of another index of the same part.
    pub fn differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let pairs = self.chunks.iter().zip(&other.chunks).zip(0u64..);
        pairs.filter(|((ours, theirs), _)| ours != theirs).map(|(_, number)| number * self.chunk)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_part_has_no_more_chunks_than_a_registry_takes() {
        for (part, chunk) in [
            (0, SMALLEST),
            (1, SMALLEST),
            (SMALLEST * MOST, SMALLEST),
            (SMALLEST * MOST + 1, 2 * SMALLEST),
            (LARGEST_PART, LARGEST),
        ] {
            assert_eq!(size_for(part), Ok(chunk), "{part}");
            assert!(part.div_ceil(chunk) <= MOST);
        }
        assert_eq!(size_for(LARGEST_PART + 1), Err(Error::TooLarge { size: LARGEST_PART + 1 }));
        assert_eq!(size_for(u64::MAX), Err(Error::TooLarge { size: u64::MAX }));
    }

    #[test]
    fn the_last_chunk_ends_with_the_part() {
        let mut index = Index::zero(SMALLEST + 10).unwrap();
        let digest = Digest::of(b"x");
        index.set(1, Some(digest));
        index.set(2, Some(digest));
        let full: Vec<Chunk> = index.full().collect();
        assert_eq!(full, [Chunk { digest, offset: SMALLEST, length: 10 }]);
    }

    proptest! {
        #[test]
        fn bytes_and_back_are_the_same_index(
            tail in 0..SMALLEST,
            chunks in prop::collection::vec(prop::option::of(any::<[u8; 32]>()), 1..20),
        ) {
            let size = (chunks.len() as u64 - 1) * SMALLEST + tail;
            let mut index = Index::zero(size).unwrap();
            for (number, bytes) in chunks.iter().enumerate() {
                let digest = bytes.filter(|bytes| bytes != &[0; 32]).map(Digest::from_bytes);
                index.set(number as u64, digest);
            }
            let back = Index::parse(size, &index.bytes()).unwrap();
            prop_assert_eq!(&back, &index);
            prop_assert_eq!(back.digest(), index.digest());
            prop_assert!(back.full().all(|chunk| chunk.length > 0 && chunk.offset + chunk.length <= size));
        }

        #[test]
        fn an_index_of_another_length_is_refused(size in 0..LARGEST_PART, length in 0usize..100_000) {
            let expected = size.div_ceil(size_for(size).unwrap()) * 32;
            let parsed = Index::parse(size, &vec![1; length]);
            prop_assert_eq!(parsed.is_ok(), expected == length as u64);
        }
    }
}
