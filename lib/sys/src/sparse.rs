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
}

/// Copies a stream into a new, empty file through `buffer`, and returns its length.
pub fn copy(reader: &mut impl Read, file: &mut File, buffer: &mut [u8]) -> Result<u64, Error> {
    let mut length = 0;
    let mut hole = 0;
    loop {
        let count = fill(reader, buffer).map_err(Error::Read)?;
        if count == 0 {
            break;
        }
        length += count as u64;
        let mut data = buffer.get(..count).unwrap_or_default();
        while !data.is_empty() {
            let empty = zeros(data, BLOCK);
            hole += empty as i64;
            data = data.get(empty..).unwrap_or_default();
            let full = full(data, BLOCK);
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

/// Bytes of the parts at the beginning that hold only zeros.
pub fn zeros(data: &[u8], part: usize) -> usize {
    run(data, part, is_zero)
}

/// Bytes of the parts at the beginning that hold something else.
pub fn full(data: &[u8], part: usize) -> usize {
    run(data, part, |part| !is_zero(part))
}

fn run(data: &[u8], part: usize, kind: impl Fn(&[u8]) -> bool) -> usize {
    data.chunks(part).take_while(|part| kind(part)).map(<[u8]>::len).sum()
}

fn is_zero(part: &[u8]) -> bool {
    part.iter().all(|byte| *byte == 0)
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
        let length = copy(&mut &content[..], &mut file, &mut vec![0; buffer]).unwrap();
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
}
