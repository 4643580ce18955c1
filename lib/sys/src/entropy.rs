//! Gives the kernel random bytes that it may count on, and makes its generator use them at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Most bytes that are credited in one call.
pub const MOST: usize = 512;

/// `struct rand_pool_info` of linux/random.h with room for the bytes.
#[repr(C)]
struct Pool {
    entropy_bits: libc::c_int,
    length: libc::c_int,
    bytes: [u8; MOST],
}

const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// Credits `bytes` (at most [`MOST`], the rest is left out) to the kernel's pool and reseeds its generator.
/// `random` is /dev/random or /dev/urandom, open for writing. Needs CAP_SYS_ADMIN.
pub fn credit(random: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    let length = bytes.len().min(MOST);
    let mut pool =
        Pool { entropy_bits: (length * 8) as libc::c_int, length: length as libc::c_int, bytes: [0; MOST] };
    for (to, from) in pool.bytes.iter_mut().zip(bytes) {
        *to = *from;
    }
    let random = random.as_fd().as_raw_fd();
    // SAFETY: the structure is laid out as the kernel reads it and holds `length` bytes.
    if unsafe { libc::ioctl(random, RNDADDENTROPY, &raw const pool) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no argument.
    if unsafe { libc::ioctl(random, RNDRESEEDCRNG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
