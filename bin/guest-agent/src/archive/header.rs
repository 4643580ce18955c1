//! Headers of members: ustar, with PAX records for what does not fit.

use std::io::{self, Write};

use imp_protocol::archive_time;
use tar::{EntryType, Header};

/// What stands in a member's header.
#[derive(Debug)]
pub(super) struct Described<'a> {
    pub(super) name: &'a [u8],
    pub(super) kind: EntryType,
    pub(super) link: &'a [u8],
    pub(super) size: u64,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified: (i64, u32),
    pub(super) device: Option<(u32, u32)>,
    pub(super) attributes: &'a [(Vec<u8>, Vec<u8>)],
}

/// Largest number in an octal field of 7 or 11 digits.
const LARGEST_ID: u32 = 0o7_777_777;
const LARGEST_SIZE: u64 = 0o77_777_777_777;
const BLOCK: usize = 512;

impl Described<'_> {
    pub(super) fn write(&self, output: &mut impl Write) -> io::Result<()> {
        let mut records = Vec::new();
        let mut header = Header::new_ustar();
        header.set_entry_type(self.kind);
        header.set_mode(self.mode & 0o7777);
        if set_name(&mut header, self.name).is_none() {
            record(&mut records, b"path", self.name);
        }
        if !self.link.is_empty() && header.set_link_name_literal(self.link).is_err() {
            record(&mut records, b"linkpath", self.link);
        }
        for (key, id) in [("uid", self.uid), ("gid", self.gid)] {
            if id > LARGEST_ID {
                record(&mut records, key.as_bytes(), id.to_string().as_bytes());
            }
        }
        header.set_uid(self.uid.min(LARGEST_ID).into());
        header.set_gid(self.gid.min(LARGEST_ID).into());
        header.set_size(self.size.min(LARGEST_SIZE));
        if self.size > LARGEST_SIZE {
            record(&mut records, b"size", self.size.to_string().as_bytes());
        }
        let (seconds, nanoseconds) = self.modified;
        let (field, modified) = archive_time::told(seconds, nanoseconds);
        header.set_mtime(field);
        if let Some(modified) = modified {
            record(&mut records, archive_time::MODIFIED.as_bytes(), modified.as_bytes());
        }
        if let Some((major, minor)) = self.device {
            header.set_device_major(major)?;
            header.set_device_minor(minor)?;
        }
        for (name, value) in self.attributes {
            record(&mut records, &[b"SCHILY.xattr.", &name[..]].concat(), value);
        }
        header.set_cksum();
        if !records.is_empty() {
            let mut extended = Header::new_ustar();
            extended.set_entry_type(EntryType::XHeader);
            let _ = set_name(&mut extended, b"PaxHeaders/member");
            extended.set_mode(0o644);
            extended.set_uid(0);
            extended.set_gid(0);
            extended.set_mtime(0);
            extended.set_size(records.len() as u64);
            extended.set_cksum();
            output.write_all(extended.as_bytes())?;
            pad(&mut records);
            output.write_all(&records)?;
        }
        output.write_all(header.as_bytes())
    }
}

/// Fills a last block.
pub(super) fn padding(length: u64) -> usize {
    (BLOCK - (length % BLOCK as u64) as usize) % BLOCK
}

/// The two empty blocks at the end of an archive.
pub(super) fn write_end(output: &mut impl Write) -> io::Result<()> {
    output.write_all(&[0; 2 * BLOCK])
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len() + padding(bytes.len() as u64), 0);
}

/// None when the name does not fit; the field is then its beginning.
fn set_name(header: &mut Header, name: &[u8]) -> Option<()> {
    let field = &mut header.as_ustar_mut()?.name;
    for (to, from) in field.iter_mut().zip(name) {
        *to = *from;
    }
    (name.len() < field.len()).then_some(())
}

/// "length key=value\n", the length counting itself.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.extend_from_slice(&[b" ", key, b"=", value, b"\n"].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_its_own_length() {
        for length in [1, 80, 90, 91, 92, 93, 94, 95, 96, 97, 98, 980, 989, 990, 991, 992] {
            let mut records = Vec::new();
            record(&mut records, b"key", &vec![b'v'; length]);
            let told: usize =
                std::str::from_utf8(&records).unwrap().split(' ').next().unwrap().parse().unwrap();
            assert_eq!(told, records.len());
        }
    }
}
