//! Streams into files, with holes where the stream has only zeros: what was sparse stays so, however large it says it is.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};

/// What file systems allocate; smaller runs of zeros are written.
const BLOCK: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the stream")]
    Read(#[source] io::Error),
    #[error("cannot write the file")]
    Write(#[source] io::Error),
    #[error("the copy is no longer wanted")]
    Unwanted,
}

/// Copies a stream into a new, empty file through `buffer`, and returns its length. `goes_on` is asked before each part:
/// the length of a hole costs its sender nothing, so a copy may go on long after the sender has left.
pub fn copy(
    reader: &mut impl Read,
    file: &mut File,
    buffer: &mut [u8],
    mut goes_on: impl FnMut() -> bool,
) -> Result<u64, Error> {
    let mut length = 0;
    let mut hole = 0;
    loop {
        if !goes_on() {
            return Err(Error::Unwanted);
        }
        let count = fill(reader, buffer).map_err(Error::Read)?;
        if count == 0 {
            break;
        }
        length += count as u64;
        let mut data = buffer.get(..count).unwrap_or_default();
        while !data.is_empty() {
            let zeros = run(data, is_zero);
            hole += zeros as i64;
            data = data.get(zeros..).unwrap_or_default();
            let full = run(data, |block| !is_zero(block));
            if full > 0 {
                if hole > 0 {
                    file.seek(SeekFrom::Current(std::mem::take(&mut hole))).map_err(Error::Write)?;
                }
                file.write_all(data.get(..full).unwrap_or_default()).map_err(Error::Write)?;
                data = data.get(full..).unwrap_or_default();
            }
        }
    }
    if hole > 0 {
        file.set_len(length).map_err(Error::Write)?;
    }
    Ok(length)
}

/// Reads until the buffer is full or the stream ends, so that blocks of the file are blocks of the buffer.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match reader.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Bytes of the blocks at the beginning that are all of one kind.
fn run(data: &[u8], kind: impl Fn(&[u8]) -> bool) -> usize {
    data.chunks(BLOCK).take_while(|block| kind(block)).map(<[u8]>::len).sum()
}

fn is_zero(block: &[u8]) -> bool {
    block.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn copied(content: &[u8], buffer: usize) -> (Vec<u8>, u64) {
        let path = std::env::temp_dir().join(format!(
            "imp-sparse-{}-{buffer}-{}",
            std::process::id(),
            content.len()
        ));
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let length = copy(&mut &content[..], &mut file, &mut vec![0; buffer], || true).unwrap();
        assert_eq!(length, content.len() as u64);
        let mut back = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut back).unwrap();
        (back, file.metadata().unwrap().blocks() * 512)
    }

    #[test]
    fn content_comes_back_and_zeros_take_no_room() {
        let mut mixed = vec![0; 1 << 20];
        mixed[5] = 1;
        mixed[700_000..700_100].fill(7);
        let mut ends_full = mixed.clone();
        ends_full.extend_from_slice(b"end");
        for content in [&b""[..], b"x", &[0; 10], &mixed, &ends_full, &[9; 9000]] {
            for buffer in [BLOCK, 64 << 10] {
                let (back, _) = copied(content, buffer);
                assert!(back == content, "{} bytes through {buffer}", content.len());
            }
        }
        assert!(copied(&mixed, 64 << 10).1 <= 64 << 10);
    }

    #[test]
    fn a_hole_without_end_stops_when_it_is_no_longer_wanted() {
        let path = std::env::temp_dir().join(format!("imp-sparse-{}", std::process::id()));
        let mut file = File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut left = 10;
        let error = copy(&mut io::repeat(0), &mut file, &mut vec![0; BLOCK], || {
            left -= 1;
            left > 0
        });
        assert!(matches!(error, Err(Error::Unwanted)), "{error:?}");
    }
}
