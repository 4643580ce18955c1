//! The 512-byte header: fields at fixed offsets, numbers in octal or in base 256.

use super::RECORD;
use crate::image::base::Refusal;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    V7,
    Ustar,
    /// ustar whose prefix is shorter, with times behind it.
    Star,
    Gnu,
}

pub(super) struct Header {
    bytes: [u8; RECORD],
    format: Format,
}

/// What the header of an old GNU sparse file says about it.
pub(super) struct OldSparse {
    /// Offset and length of what is stored.
    pub(super) pairs: Vec<(u64, u64)>,
    /// More pairs follow in a record of their own.
    pub(super) more: bool,
    /// Of the file with its holes.
    pub(super) size: u64,
}

impl Header {
    /// Checks the checksum; a block of zeros is no header.
    pub(super) fn parse(bytes: [u8; RECORD]) -> Result<Self, Refusal> {
        let format = format(&bytes);
        let header = Self { bytes, format };
        let stored = header.octal("checksum", 148, 8).map_err(|_| Refusal::Checksum)?;
        let (mut unsigned, mut signed) = (0_i64, 0_i64);
        for (offset, byte) in bytes.iter().enumerate() {
            let byte = if (148..156).contains(&offset) { b' ' } else { *byte };
            unsigned += i64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        // Old writers summed signed characters.
        if stored != unsigned && stored != signed {
            return Err(Refusal::Checksum);
        }
        Ok(header)
    }

    pub(super) fn type_flag(&self) -> u8 {
        self.bytes.get(156).copied().unwrap_or(0)
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        let prefix = match self.format {
            Format::Ustar => self.text(345, 155),
            Format::Star => self.text(345, 131),
            Format::V7 | Format::Gnu => &[],
        };
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    pub(super) fn link_target(&self) -> Vec<u8> {
        self.text(157, 100).to_vec()
    }

    pub(super) fn permissions(&self) -> Result<u16, Refusal> {
        let mode = self.number("mode", 100, 8)?;
        Ok(u16::try_from(mode & 0o7777).expect("twelve bits"))
    }

    pub(super) fn uid(&self) -> Result<u32, Refusal> {
        u32::try_from(self.number("uid", 108, 8)?).map_err(|_| Refusal::Number("uid"))
    }

    pub(super) fn gid(&self) -> Result<u32, Refusal> {
        u32::try_from(self.number("gid", 116, 8)?).map_err(|_| Refusal::Number("gid"))
    }

    pub(super) fn size(&self) -> Result<u64, Refusal> {
        u64::try_from(self.number("size", 124, 12)?).map_err(|_| Refusal::Number("size"))
    }

    pub(super) fn modified(&self) -> Result<i64, Refusal> {
        self.number("mtime", 136, 12)
    }

    /// Major and minor; formats without them have zeros.
    pub(super) fn device(&self) -> Result<(u64, u64), Refusal> {
        if self.format == Format::V7 {
            return Ok((0, 0));
        }
        let number = |name, at| u64::try_from(self.number(name, at, 8)?).map_err(|_| Refusal::Number(name));
        Ok((number("devmajor", 329)?, number("devminor", 337)?))
    }

    pub(super) fn old_sparse(&self) -> Result<OldSparse, Refusal> {
        let pairs = sparse_pairs(self.field(386, 96))?;
        let more = self.bytes.get(482).is_some_and(|flag| *flag != 0);
        let size =
            u64::try_from(self.number("realsize", 483, 12)?).map_err(|_| Refusal::Number("realsize"))?;
        Ok(OldSparse { pairs, more, size })
    }

    fn field(&self, at: usize, length: usize) -> &[u8] {
        self.bytes.get(at..at + length).expect("fields lie inside the header")
    }

    fn text(&self, at: usize, length: usize) -> &[u8] {
        until_nul(self.field(at, length))
    }

    fn number(&self, name: &'static str, at: usize, length: usize) -> Result<i64, Refusal> {
        number(name, self.field(at, length))
    }

    fn octal(&self, name: &'static str, at: usize, length: usize) -> Result<i64, Refusal> {
        octal(name, self.field(at, length))
    }
}

fn format(bytes: &[u8; RECORD]) -> Format {
    match bytes.get(257..265) {
        Some(b"ustar  \0") => Format::Gnu,
        Some([b'u', b's', b't', b'a', b'r', 0, ..]) if bytes.ends_with(b"tar\0") => Format::Star,
        Some([b'u', b's', b't', b'a', b'r', 0, ..]) => Format::Ustar,
        _ => Format::V7,
    }
}

/// The (offset, length) pairs of a sparse header, up to the first that is empty.
pub(super) fn sparse_pairs(bytes: &[u8]) -> Result<Vec<(u64, u64)>, Refusal> {
    let mut pairs = Vec::new();
    for pair in bytes.chunks_exact(24) {
        let (offset, length) = pair.split_at(12);
        if offset.first().is_none_or(|byte| *byte == 0) {
            break;
        }
        let positive = |field| u64::try_from(number("sparse", field)?).map_err(|_| Refusal::SparseMap);
        pairs.push((positive(offset)?, positive(length)?));
    }
    Ok(pairs)
}

pub(super) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or(&[])
}

/// Octal text, or two's complement in base 256 where the highest bit is set.
fn number(name: &'static str, field: &[u8]) -> Result<i64, Refusal> {
    match field.split_first() {
        Some((first, rest)) if first & 0x80 != 0 => {
            let negative = first & 0x40 != 0;
            let start = i128::from(first & 0x7f) - if negative { 0x80 } else { 0 };
            // Twelve bytes at most: 95 bits.
            let value = rest.iter().fold(start, |value, byte| (value << 8) | i128::from(*byte));
            i64::try_from(value).map_err(|_| Refusal::Number(name))
        }
        _ => octal(name, field),
    }
}

fn octal(name: &'static str, field: &[u8]) -> Result<i64, Refusal> {
    let text = until_nul(field).trim_ascii();
    text.iter().try_fold(0_i64, |value, byte| match byte {
        b'0'..=b'7' => Ok((value << 3) | i64::from(byte - b'0')),
        _ => Err(Refusal::Number(name)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256() {
        assert_eq!(number("n", b"0000644\0"), Ok(0o644));
        assert_eq!(number("n", b"   644 \0"), Ok(0o644));
        assert_eq!(number("n", b"\0\0\0\0"), Ok(0));
        assert_eq!(number("n", &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), Ok(0xffff_ffff));
        assert_eq!(number("n", &[0xff; 12]), Ok(-1));
        assert_eq!(number("n", b"0000648\0"), Err(Refusal::Number("n")));
        assert_eq!(number("n", &[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Err(Refusal::Number("n")));
    }
}
