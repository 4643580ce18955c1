//! fs-verity: files that the kernel itself keeps from changing, and checks while they are read
//! (linux/Documentation/filesystems/fsverity.rst).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::ioctl;

// From <linux/fsverity.h>.
const ENABLE: ioctl::Opcode = ioctl::opcode::write::<EnableArg>(b'f', 133);
const MEASURE: ioctl::Opcode = ioctl::opcode::read_write::<[u16; 2]>(b'f', 134);
const SHA256: u16 = 1;
const BLOCK: u32 = 4096;

#[repr(C)]
#[derive(Default)]
struct EnableArg {
    version: u32,
    hash_algorithm: u32,
    block_size: u32,
    salt_size: u32,
    salt_ptr: u64,
    sig_size: u32,
    reserved1: u32,
    sig_ptr: u64,
    reserved2: [u64; 11],
}

#[repr(C)]
struct MeasureArg {
    algorithm: u16,
    size: u16,
    digest: [u8; 32],
}

/// What became of a file that was to be sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// From now on nobody changes its content, not even root; it can still be removed.
    Now,
    /// It was already.
    Before,
    /// The file system, or the kernel, cannot.
    Unsupported,
}

/// Makes the content of a file unchangeable. It must be open for reading only, and nobody may have it open for writing.
pub fn enable(file: &File) -> io::Result<Sealed> {
    let argument =
        EnableArg { version: 1, hash_algorithm: SHA256.into(), block_size: BLOCK, ..EnableArg::default() };
    // SAFETY: the kernel reads a structure of this size and layout, whose pointers are null and of length zero.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), ENABLE as _, &raw const argument) };
    if made == 0 {
        return Ok(Sealed::Now);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EEXIST) => Ok(Sealed::Before),
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL | libc::ENOPKG) => Ok(Sealed::Unsupported),
        _ => Err(error),
    }
}

/// The digest by which the kernel knows a file that is sealed with SHA-256; None for one that is not.
pub fn measure(file: &File) -> io::Result<Option<[u8; 32]>> {
    let mut argument = MeasureArg { algorithm: 0, size: 32, digest: [0; 32] };
    // SAFETY: the kernel writes at most `size` bytes behind the two numbers, and as many are there.
    let measured = unsafe { libc::ioctl(file.as_raw_fd(), MEASURE as _, &raw mut argument) };
    if measured == 0 {
        return Ok((argument.algorithm == SHA256 && argument.size == 32).then_some(argument.digest));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENODATA | libc::EOPNOTSUPP | libc::ENOTTY | libc::EOVERFLOW) => Ok(None),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_are_those_of_the_header() {
        assert_eq!((ENABLE, MEASURE), (0x4080_6685, 0xc004_6686));
    }

    #[test]
    fn a_file_is_sealed_and_measured_or_said_to_be_neither() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"content").unwrap();
        let path = file.into_temp_path();
        let reading = File::open(&path).unwrap();
        let measured_before = measure(&reading).unwrap();
        assert_eq!(measured_before, None);
        match enable(&reading).unwrap() {
            Sealed::Unsupported => assert_eq!(measure(&reading).unwrap(), None),
            Sealed::Now => {
                assert!(measure(&reading).unwrap().is_some());
                assert_eq!(enable(&reading).unwrap(), Sealed::Before);
                assert!(std::fs::OpenOptions::new().write(true).open(&path).is_err());
            }
            Sealed::Before => panic!("a new file cannot be sealed"),
        }
    }
}
