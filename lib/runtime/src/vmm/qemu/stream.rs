//! Takes a guest's memory out of a stream that QEMU writes when it migrates a machine, so that the memory becomes a file
//! which machines can share and the rest is small.
//!
//! The form of the stream is that of docs/devel/migration.rst, migration/savevm.c and migration/ram.c of QEMU: a header,
//! the sections of memory, then those of the devices. What is left is a stream itself, in which no page of the guest's
//! memory comes; the small memories of the machine's firmware stay.

use std::fs::File;
use std::io::{self, Read};

use super::pages::Pages;

const MAGIC: u32 = 0x5145_564d;
const VERSION: u32 = 3;

const SECTION_START: u8 = 0x01;
const SECTION_PART: u8 = 0x02;
const SECTION_END: u8 = 0x03;
const CONFIGURATION: u8 = 0x07;
const SECTION_FOOTER: u8 = 0x7e;
/// The one section that comes in parts.
const MEMORY: &[u8] = b"ram";

/// What a record of memory is, in the low bits of its address.
const ZERO: u64 = 0x02;
const BLOCKS: u64 = 0x04;
const PAGE: u64 = 0x08;
const END: u64 = 0x10;
const SAME_BLOCK: u64 = 0x20;
const FLAGS: u64 = 0xfff;

pub(super) const PAGE_SIZE: u64 = 4096;
/// Devices take a few hundred kilobytes.
pub(super) const LARGEST_REST: u64 = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read what QEMU sends")]
    Read(#[source] io::Error),
    #[error("cannot write the guest's memory")]
    Write(#[source] io::Error),
    #[error("QEMU sends something that is not understood: {what}")]
    Form { what: &'static str },
    #[error("QEMU sends {there} of {expected} bytes of memory")]
    Memory { there: u64, expected: u64 },
}

/// Writes the pages of the memory called `block` into `memory`, an empty file, with holes for zeros, and returns the rest.
pub(super) fn split(stream: impl Read, block: &str, size: u64, memory: &File) -> Result<Vec<u8>, Error> {
    memory.set_len(size).map_err(Error::Write)?;
    let mut splitter = Splitter {
        stream,
        rest: Vec::new(),
        pages: Pages::new(memory, size),
        block: block.as_bytes(),
        current: Vec::new(),
    };
    splitter.header()?;
    splitter.memory()?;
    splitter.pages.finish()?;
    splitter.devices()
}

struct Splitter<'a, R> {
    stream: R,
    rest: Vec<u8>,
    pages: Pages<'a>,
    block: &'a [u8],
    /// Whose the last page was, which the next one need not say; also when a new part has begun.
    current: Vec<u8>,
}

impl<R: Read> Splitter<'_, R> {
    fn header(&mut self) -> Result<(), Error> {
        if self.keep_u32()? != MAGIC || self.keep_u32()? != VERSION {
            return Err(Error::Form { what: "it is no machine" });
        }
        Ok(())
    }

    /// Until the memory's last part.
    fn memory(&mut self) -> Result<(), Error> {
        loop {
            match self.keep_u8()? {
                CONFIGURATION => {
                    let length = self.keep_u32()?;
                    self.keep(length as usize)?;
                }
                SECTION_START => {
                    let id = self.keep_u32()?;
                    if self.keep_name()? != MEMORY {
                        return Err(Error::Form { what: "a section besides memory that comes in parts" });
                    }
                    // Instance and version.
                    self.keep(8)?;
                    self.records()?;
                    self.footer(id)?;
                }
                SECTION_PART => {
                    let id = self.keep_u32()?;
                    self.records()?;
                    self.footer(id)?;
                }
                SECTION_END => {
                    let id = self.keep_u32()?;
                    self.records()?;
                    return self.footer(id);
                }
                _ => return Err(Error::Form { what: "a section of an unknown kind" }),
            }
        }
    }

    fn footer(&mut self, id: u32) -> Result<(), Error> {
        if self.keep_u8()? != SECTION_FOOTER || self.keep_u32()? != id {
            return Err(Error::Form { what: "a section without an end" });
        }
        Ok(())
    }

    fn records(&mut self) -> Result<(), Error> {
        loop {
            let head = self.take_u64()?;
            let (at, flags) = (head & !FLAGS, head & FLAGS);
            match flags & !SAME_BLOCK {
                END => {
                    self.rest.extend(head.to_be_bytes());
                    return self.bounded();
                }
                BLOCKS => {
                    self.rest.extend(head.to_be_bytes());
                    self.bounded()?;
                    self.blocks(at)?;
                }
                kind @ (ZERO | PAGE) => {
                    if flags & SAME_BLOCK == 0 {
                        self.current = self.take_name()?;
                    }
                    self.page(kind, at)?;
                }
                _ => return Err(Error::Form { what: "a record of memory of an unknown kind" }),
            }
        }
    }

    /// Names and sizes of all memories, until they add up.
    fn blocks(&mut self, total: u64) -> Result<(), Error> {
        let mut left = total;
        while left > 0 {
            let name = self.keep_name()?;
            let size = self.keep_u64()?;
            if name == self.block && size != self.pages.size {
                return Err(Error::Memory { there: size, expected: self.pages.size });
            }
            left = left.checked_sub(size).ok_or(Error::Form { what: "memories larger than all of them" })?;
            if size == 0 {
                return Err(Error::Form { what: "a memory without a size" });
            }
        }
        Ok(())
    }

    fn page(&mut self, kind: u64, at: u64) -> Result<(), Error> {
        let mut page = [0; PAGE_SIZE as usize];
        let content = if kind == ZERO { page.get_mut(..1) } else { page.get_mut(..) }.unwrap_or_default();
        self.stream.read_exact(content).map_err(Error::Read)?;
        if self.current.is_empty() {
            return Err(Error::Form { what: "a page of no memory" });
        }
        if self.current != self.block {
            self.rest.extend((at | kind).to_be_bytes());
            self.rest.push(self.current.len() as u8);
            self.rest.extend_from_slice(&self.current);
            self.rest.extend_from_slice(content);
            return self.bounded();
        }
        match (kind, content.first()) {
            (ZERO, Some(0)) => self.pages.zero(at),
            (ZERO, _) => Err(Error::Form { what: "a page of one byte that is not zero" }),
            _ => self.pages.write(at, content),
        }
    }

    fn devices(mut self) -> Result<Vec<u8>, Error> {
        let room = LARGEST_REST - (self.rest.len() as u64).min(LARGEST_REST);
        self.stream.take(room + 1).read_to_end(&mut self.rest).map_err(Error::Read)?;
        if self.rest.len() as u64 > LARGEST_REST {
            return Err(Error::Form { what: "more devices than there can be" });
        }
        Ok(self.rest)
    }

    fn bounded(&self) -> Result<(), Error> {
        if self.rest.len() as u64 > LARGEST_REST {
            return Err(Error::Form { what: "more besides the guest's memory than there can be" });
        }
        Ok(())
    }

    /// Reads so many bytes and leaves them in the stream.
    fn keep(&mut self, count: usize) -> Result<&[u8], Error> {
        let start = self.rest.len();
        if count as u64 > LARGEST_REST {
            return Err(Error::Form { what: "a section that is too long" });
        }
        self.rest.resize(start + count, 0);
        let kept = self.rest.get_mut(start..).unwrap_or_default();
        self.stream.read_exact(kept).map_err(Error::Read)?;
        self.bounded()?;
        Ok(self.rest.get(start..).unwrap_or_default())
    }

    fn keep_u8(&mut self) -> Result<u8, Error> {
        Ok(self.keep(1)?.first().copied().unwrap_or_default())
    }

    fn keep_u32(&mut self) -> Result<u32, Error> {
        Ok(self.keep(4)?.try_into().map_or(0, u32::from_be_bytes))
    }

    fn keep_u64(&mut self) -> Result<u64, Error> {
        Ok(self.keep(8)?.try_into().map_or(0, u64::from_be_bytes))
    }

    fn keep_name(&mut self) -> Result<Vec<u8>, Error> {
        let length = self.keep_u8()?;
        Ok(self.keep(length.into())?.to_vec())
    }

    /// Reads a number and takes it out of the stream.
    fn take_u64(&mut self) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.stream.read_exact(&mut bytes).map_err(Error::Read)?;
        Ok(u64::from_be_bytes(bytes))
    }

    fn take_name(&mut self) -> Result<Vec<u8>, Error> {
        let mut length = [0];
        self.stream.read_exact(&mut length).map_err(Error::Read)?;
        let mut name = vec![0; length.first().copied().unwrap_or_default().into()];
        self.stream.read_exact(&mut name).map_err(Error::Read)?;
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    const BLOCK: &str = "memory";
    const SIZE: u64 = 600 * PAGE_SIZE;

    /// A stream as QEMU writes it: page 3, all of pages 200 to 499, and the firmware hold something.
    fn stream(pages: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |part: &[u8]| bytes.extend_from_slice(part);
        put(&MAGIC.to_be_bytes());
        put(&VERSION.to_be_bytes());
        put(&[CONFIGURATION, 0, 0, 0, 7]);
        put(b"microvm");
        let name = |name: &str| [&[name.len() as u8], name.as_bytes()].concat();
        put(&[SECTION_START, 0, 0, 0, 2]);
        put(&name("ram"));
        put(&[0, 0, 0, 0, 0, 0, 0, 4]);
        put(&((SIZE + PAGE_SIZE) | BLOCKS).to_be_bytes());
        for (block, size) in [(BLOCK, SIZE), ("pc.bios", PAGE_SIZE)] {
            put(&name(block));
            put(&size.to_be_bytes());
        }
        put(&END.to_be_bytes());
        put(&[SECTION_FOOTER, 0, 0, 0, 2]);
        put(&[SECTION_PART, 0, 0, 0, 2]);
        for page in 0..pages {
            if page == 300 {
                put(&END.to_be_bytes());
                put(&[SECTION_FOOTER, 0, 0, 0, 2]);
                put(&[SECTION_PART, 0, 0, 0, 2]);
            }
            let same = if page == 0 { 0 } else { SAME_BLOCK };
            let (kind, content) = match page {
                3 | 200..500 => (PAGE, vec![page as u8; PAGE_SIZE as usize]),
                _ => (ZERO, vec![0]),
            };
            put(&((page * PAGE_SIZE) | kind | same).to_be_bytes());
            if page == 0 {
                put(&name(BLOCK));
            }
            put(&content);
        }
        put(&PAGE.to_be_bytes());
        put(&name("pc.bios"));
        put(&[9; PAGE_SIZE as usize]);
        put(&END.to_be_bytes());
        put(&[SECTION_FOOTER, 0, 0, 0, 2]);
        put(&[SECTION_END, 0, 0, 0, 2]);
        put(&END.to_be_bytes());
        put(&[SECTION_FOOTER, 0, 0, 0, 2]);
        put(b"devices");
        bytes
    }

    fn try_split(stream: &[u8]) -> Result<(Vec<u8>, File), Error> {
        let file = tempfile::tempfile().unwrap();
        split(stream, BLOCK, SIZE, &file).map(|rest| (rest, file))
    }

    #[test]
    fn memory_becomes_a_sparse_file_and_the_rest_is_a_stream_without_it() {
        let (rest, file) = try_split(&stream(600)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), SIZE);
        assert!(file.metadata().unwrap().blocks() * 512 < 310 * PAGE_SIZE, "zeros are holes");
        let mut page = [0; PAGE_SIZE as usize];
        for number in 0..600 {
            file.read_exact_at(&mut page, number * PAGE_SIZE).unwrap();
            let expected = if number == 3 || (200..500).contains(&number) { number as u8 } else { 0 };
            assert!(page.iter().all(|byte| *byte == expected), "page {number}");
        }
        assert!(rest.ends_with(b"devices") && rest.len() < 2 * PAGE_SIZE as usize);
        assert_eq!(rest.windows(7).filter(|part| *part == b"pc.bios").count(), 2);
        // What is left has no memory of the guest any more.
        assert!(matches!(try_split(&rest), Err(Error::Memory { there: 0, expected: SIZE })));
    }

    #[test]
    fn a_page_that_comes_again_is_the_later_one() {
        let stream = stream(600);
        let again = ((3 * PAGE_SIZE) | ZERO).to_be_bytes();
        // In the last part.
        let at = stream.len() - b"devices".len() - 5 - 8;
        let mut changed = stream[..at].to_vec();
        changed.extend(again);
        changed.push(BLOCK.len() as u8);
        changed.extend(BLOCK.as_bytes());
        changed.push(0);
        changed.extend(&stream[at..]);
        let (_, file) = try_split(&changed).unwrap();
        let mut page = [1; PAGE_SIZE as usize];
        file.read_exact_at(&mut page, 3 * PAGE_SIZE).unwrap();
        assert_eq!(page, [0; PAGE_SIZE as usize]);
    }

    #[test]
    fn a_stream_that_breaks_off_or_lacks_memory_is_an_error() {
        let whole = stream(600);
        for length in (0..whole.len() - b"devices".len()).step_by(997) {
            assert!(try_split(&whole[..length]).is_err(), "{length}");
        }
        assert!(matches!(try_split(&stream(599)), Err(Error::Memory { .. })));
        assert!(matches!(try_split(&stream(601)), Err(Error::Form { .. })));
    }

    #[test]
    fn a_stream_without_an_end_is_an_error() {
        let whole = stream(0);
        let begun = whole.len() - b"devices".len() - 5 - 8 - 5;
        // Memories that add up to nothing.
        let endless = whole[..begun].chain(Repeat { part: BLOCKS.to_be_bytes(), at: 0 });
        let file = tempfile::tempfile().unwrap();
        let error = split(io::BufReader::new(endless), BLOCK, SIZE, &file).unwrap_err();
        assert!(matches!(error, Error::Form { .. }), "{error:?}");
    }

    struct Repeat {
        part: [u8; 8],
        at: usize,
    }

    impl Read for Repeat {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            for byte in &mut *buffer {
                *byte = self.part[self.at % 8];
                self.at += 1;
            }
            Ok(buffer.len())
        }
    }

    #[test]
    fn noise_is_an_error_and_nothing_worse() {
        let whole = stream(600);
        for at in 0..200 {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            // Some bytes matter to QEMU alone.
            let _ = try_split(&damaged);
        }
    }
}
