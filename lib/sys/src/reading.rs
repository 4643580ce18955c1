//! Reading into memory that nobody has cleared before.

use std::os::fd::AsFd;

use rustix::io::Errno;
use tokio::io::ReadBuf;

/// Reads at most `most` bytes behind what is filled. The caller looks at them with `initialize_unfilled_to`, which has
/// nothing to clear then, and advances.
pub fn behind_filled(file: impl AsFd, buffer: &mut ReadBuf<'_>, most: usize) -> Result<usize, Errno> {
    // SAFETY: nothing but initialised bytes is written to it, and only by the kernel.
    let unfilled = unsafe { buffer.unfilled_mut() };
    let most = most.min(unfilled.len());
    let (read, _) = rustix::io::read(file, unfilled.get_mut(..most).unwrap_or_default())?;
    let count = read.len();
    // SAFETY: the kernel has written as many bytes as it says.
    unsafe { buffer.assume_init(count) };
    Ok(count)
}

/// Reads at most `most` bytes to the end of `memory`, into capacity that is there.
pub fn behind_content(file: impl AsFd, memory: &mut Vec<u8>, most: usize) -> Result<usize, Errno> {
    let spare = memory.spare_capacity_mut();
    let most = most.min(spare.len());
    let (read, _) = rustix::io::read(file, spare.get_mut(..most).unwrap_or_default())?;
    let count = read.len();
    let length = memory.len() + count;
    // SAFETY: within the capacity, and the kernel has written as many bytes as it says.
    unsafe { memory.set_len(length) };
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    #[test]
    fn what_was_read_stands_behind_what_was_there() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcdef").unwrap();
        file.rewind().unwrap();
        let mut memory = Vec::with_capacity(16);
        memory.extend_from_slice(b"12");
        assert_eq!(behind_content(&file, &mut memory, 4).unwrap(), 4);
        assert_eq!(memory, b"12abcd");
        let mut bytes = [std::mem::MaybeUninit::uninit(); 8];
        let mut buffer = ReadBuf::uninit(&mut bytes);
        buffer.put_slice(b"3");
        assert_eq!(behind_filled(&file, &mut buffer, 100).unwrap(), 2);
        assert_eq!(buffer.filled(), b"3");
        assert_eq!(buffer.initialize_unfilled_to(2), b"ef");
        assert_eq!(behind_filled(&file, &mut buffer, 100).unwrap(), 0);
    }
}
