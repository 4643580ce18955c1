//! Little-endian fields at fixed offsets of on-disk records.

pub(super) fn put(record: &mut [u8], offset: usize, bytes: &[u8]) {
    record
        .get_mut(offset..offset + bytes.len())
        .expect("a field lies inside its record")
        .copy_from_slice(bytes);
}

pub(super) fn put8(record: &mut [u8], offset: usize, value: u8) {
    put(record, offset, &[value]);
}

pub(super) fn put16(record: &mut [u8], offset: usize, value: u16) {
    put(record, offset, &value.to_le_bytes());
}

pub(super) fn put32(record: &mut [u8], offset: usize, value: u32) {
    put(record, offset, &value.to_le_bytes());
}

/// The low 16 bits: for fields that are split in two halves.
pub(super) fn low16(value: u32) -> u16 {
    (value & 0xffff) as u16
}

pub(super) fn high16(value: u32) -> u16 {
    (value >> 16) as u16
}

pub(super) fn low32(value: u64) -> u32 {
    (value & 0xffff_ffff) as u32
}

pub(super) fn high32(value: u64) -> u32 {
    (value >> 32) as u32
}

pub(super) fn prefix(record: &[u8], length: usize) -> &[u8] {
    record.get(..length).expect("a prefix is no longer than its record")
}
