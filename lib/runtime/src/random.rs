//! Random bytes of the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        // Fails only where the system call is missing or interrupted before the pool was ready.
        filled += getrandom(rest, GetRandomFlags::empty()).unwrap_or(0);
    }
    bytes
}

pub(crate) fn number() -> u64 {
    u64::from_le_bytes(bytes())
}
