//! AF_VSOCK: connections between a guest and its host.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A non-blocking listener for `port` on every context id. Accept from it with [`rustix::net::accept_with`].
pub fn listen(port: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
    let address = address(libc::VMADDR_CID_ANY, port);
    // SAFETY: a valid address of that length.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) } != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

/// Connects to `port` of the host. Blocks until the host has answered, two seconds at the most.
pub fn connect_to_host(port: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
    let address = address(libc::VMADDR_CID_HOST, port);
    // SAFETY: a valid address of that length.
    if unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: an address of all zero bytes is a valid one.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}
