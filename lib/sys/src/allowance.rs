//! Streams of which only so much may be read at a time: who reads an archive keeps its names and records in memory, and in a
//! hostile one they are as long as it likes.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};

/// What may be read of a stream from now on. It is set anew while the stream is in the hands of its reader.
#[derive(Debug)]
pub struct Allowance {
    /// Bytes; none: as many as there are.
    left: Cell<Option<u64>>,
    ended: Cell<bool>,
}

impl Allowance {
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        Self { left: Cell::new(Some(bytes)), ended: Cell::new(false) }
    }

    /// From now on so many bytes, whatever was left.
    pub fn set(&self, bytes: u64) {
        self.left.set(Some(bytes));
    }

    /// From now on as many bytes as there are.
    pub fn lift(&self) {
        self.left.set(None);
    }

    /// Whether the last read that was not free came to the end of the stream.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended.get()
    }

    /// The stream, with what is allowed of it.
    pub fn bound<R>(&self, inner: R) -> Bounded<'_, R> {
        Bounded { inner, allowance: self }
    }
}

/// A stream that fails where more would be read than is allowed. Passing over a part with a seek is free.
#[derive(Debug)]
pub struct Bounded<'a, R> {
    inner: R,
    allowance: &'a Allowance,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(left) = self.allowance.left.get() else { return self.inner.read(buffer) };
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a member's names and records are too long",
            ));
        }
        let room = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = self.inner.read(buffer.get_mut(..room).unwrap_or_default())?;
        self.allowance.ended.set(count == 0 && room > 0);
        self.allowance.left.set(Some(left - count as u64));
        Ok(count)
    }
}

impl<R: Seek> Seek for Bounded<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_is_allowed_is_an_error_until_more_is_allowed() {
        let allowance = Allowance::of(10);
        let mut endless = allowance.bound(io::repeat(1));
        let mut ten = [0; 10];
        endless.read_exact(&mut ten).unwrap();
        assert_eq!(endless.read(&mut []).unwrap(), 0);
        assert_eq!(endless.read(&mut ten).unwrap_err().kind(), io::ErrorKind::InvalidData);
        allowance.set(3);
        assert_eq!(endless.read(&mut ten).unwrap(), 3);
        allowance.lift();
        endless.read_exact(&mut [0; 1000]).unwrap();
    }

    #[test]
    fn the_end_of_the_stream_is_told_from_the_end_of_what_is_allowed() {
        let allowance = Allowance::of(3);
        let mut short = allowance.bound(&b"abc"[..]);
        short.read_exact(&mut [0; 3]).unwrap();
        assert!(short.read(&mut [0]).is_err() && !allowance.ended());
        allowance.set(3);
        assert_eq!(short.read(&mut [0]).unwrap(), 0);
        assert!(allowance.ended());
    }
}
