//! The lane of a VM: a byte stream beside its channel that carries the archive of one call at a time, past HTTP/2.
//!
//! ```text
//! client ─► owner   the VM's id, on the owner's socket for lanes (`hand_over`)
//! owner  ─► agent   a greeting (`hello`) on the lane; its nonce is the lane's number until the next greeting
//! owner  ─► client  the lane itself, a descriptor, with its number
//! client ─► agent   a call with the number, on the channel
//! agent  ─► client  TAKEN, on the lane
//! then chunks from whoever has the archive: length (4 bytes, big endian, at most MOST), and so many bytes; 0 is the end
//! ```
//!
//! The answer of the call is the only result: a lane that ends without the end of its chunks has broken, and so does a lane
//! whose call has ended. An owner that hangs up without an answer has no lane to give, because the machine has none, the
//! agent knows none, or somebody else uses it; then the archive goes in messages of the call.

use std::io::{self, Read, Write};

mod hand_over;

pub use hand_over::{LONGEST_ID, Lane, give};

/// Most bytes of a chunk.
pub const MOST: usize = 1 << 20;
/// What the agent says first, once a call has taken the lane.
pub const TAKEN: u8 = b'T';

/// The lane's vsock port, where the channel is one: each connection to it is a lane, greeted and used once.
pub const fn vsock_port(channel: u32) -> u32 {
    channel + 1
}

/// Writes chunks: one for each write that is not larger than [`MOST`].
#[derive(Debug)]
pub struct Writer<W>(W);

impl<W: Write> Writer<W> {
    pub fn new(lane: W) -> Self {
        Self(lane)
    }

    /// Says that all chunks were written. Whoever is not told so takes the stream for a broken one.
    pub fn finish(mut self) -> io::Result<()> {
        self.0.write_all(&[0; 4])?;
        self.0.flush()
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let chunk = bytes.get(..MOST).unwrap_or(bytes);
        if chunk.is_empty() {
            return Ok(0);
        }
        self.0.write_all(&(chunk.len() as u32).to_be_bytes())?;
        self.0.write_all(chunk)?;
        Ok(chunk.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Reads what is in chunks; ends where the chunks do, and fails when the lane ends before.
#[derive(Debug)]
pub struct Reader<R> {
    lane: R,
    /// Bytes left of the chunk.
    left: usize,
    ended: bool,
}

impl<R: Read> Reader<R> {
    pub fn new(lane: R) -> Self {
        Self { lane, left: 0, ended: false }
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.ended {
            let mut length = [0; 4];
            self.lane.read_exact(&mut length)?;
            self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            self.ended = self.left == 0;
            if self.left > MOST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a chunk is too long"));
            }
        }
        let room = buffer.len().min(self.left);
        if room == 0 {
            return Ok(0);
        }
        let count = self.lane.read(buffer.get_mut(..room).unwrap_or_default())?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left = self.left.saturating_sub(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(parts: &[Vec<u8>]) -> Vec<u8> {
        let mut lane = Vec::new();
        let mut writer = Writer::new(&mut lane);
        for part in parts {
            writer.write_all(part).unwrap();
        }
        writer.finish().unwrap();
        lane
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_what_is_cut_off_is_never_whole(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let lane = written(&parts);
            let mut read = Vec::new();
            Reader::new(&lane[..]).read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read, &parts.concat());
            let torn = &lane[..cut.index(lane.len())];
            let error = Reader::new(torn).read_to_end(&mut Vec::new()).unwrap_err();
            prop_assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_write_of_any_size_makes_no_chunk_that_is_too_long() {
        let parts = [vec![1; 2 * MOST + 5]];
        let lane = written(&parts);
        assert_eq!(lane.len(), parts[0].len() + 4 * 4);
        let mut read = Vec::new();
        Reader::new(&lane[..]).read_to_end(&mut read).unwrap();
        assert!(read == parts[0]);
    }

    #[test]
    fn a_chunk_that_is_too_long_is_refused_before_it_is_read() {
        for length in [MOST as u32 + 1, u32::MAX] {
            let lane = [&length.to_be_bytes()[..], &[0; 100]].concat();
            let error = Reader::new(&lane[..]).read(&mut [0; 10]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn nothing_is_read_behind_the_end() {
        let lane = [written(&[vec![7; 3]]), vec![1; 9]].concat();
        let mut rest = &lane[..];
        let mut reader = Reader::new(&mut rest);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap(), 0);
        assert_eq!((read, rest), (vec![7; 3], &[1; 9][..]));
    }
}
