//! The end of a TCP connection that the other side does not hear of.

use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsFd, AsRawFd};

/// Takes the socket out of repair without a probe of the other side's window.
const REPAIR_OFF_NO_PROBE: libc::c_int = -1;

/// Ends the connection of `socket`: whoever waits for it meets an error, and nothing is sent. Needs CAP_NET_ADMIN in the
/// socket's network namespace.
pub fn end_silently(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    // A connection under repair is dropped where otherwise a reset would go out.
    set_repair(socket, 1)?;
    let ended = rustix::net::connect_unspec(socket).map_err(io::Error::from);
    set_repair(socket, REPAIR_OFF_NO_PROBE)?;
    ended
}

fn set_repair(socket: impl AsFd, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the option's value is an int, and its length says so.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
