//! POSIX ACLs: the form that system calls and tars use, turned into the shorter one that ext4 stores.

use super::Refusal;

const CALL_VERSION: [u8; 4] = 2_u32.to_le_bytes();
const STORED_VERSION: [u8; 4] = 1_u32.to_le_bytes();
/// The tags of entries that name a user or a group (`include/uapi/linux/posix_acl.h`).
const USER: [u8; 2] = 2_u16.to_le_bytes();
const GROUP: [u8; 2] = 8_u16.to_le_bytes();

/// Entries are tag, permissions and id; only those that name somebody keep the id.
pub(super) fn stored(value: &[u8]) -> Result<Vec<u8>, Refusal> {
    let entries = value.strip_prefix(&CALL_VERSION).filter(|entries| entries.len().is_multiple_of(8));
    let mut stored = STORED_VERSION.to_vec();
    for entry in entries.ok_or(Refusal::Acl)?.chunks_exact(8) {
        let (short, id) = entry.split_at(4);
        stored.extend_from_slice(short);
        if short.starts_with(&USER) || short.starts_with(&GROUP) {
            stored.extend_from_slice(id);
        }
    }
    Ok(stored)
}
