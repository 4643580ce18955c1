//! Takes ownership of descriptors that the program was started with.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The descriptor `number` that the parent process left open for this program, now closed on exec.
///
/// Call it once for each number, at the start of the program, for numbers that the program was told (3 and above):
/// what this program opens itself is not inherited.
pub fn take(number: i32) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: not -1; it is only asked whether it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed)?;
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: it is open, and by the contract above nothing in this program owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
