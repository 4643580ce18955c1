//! What a child inherits.

use std::io;

/// Marks every descriptor above the standard three so that programs started from now on do not inherit it.
pub fn close_on_exec_above_standard() -> io::Result<()> {
    // SAFETY: the call closes nothing and touches no memory; it sets a flag on descriptors, whoever owns them.
    let done = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn a_descriptor_that_would_be_inherited_is_not() {
        let file = std::fs::File::open("/dev/null").expect("/dev/null opens");
        fcntl_setfd(&file, FdFlags::empty()).expect("the flag can be cleared");
        close_on_exec_above_standard().expect("the kernel knows close_range");
        assert_eq!(fcntl_getfd(&file).expect("the flag can be read"), FdFlags::CLOEXEC);
    }
}
