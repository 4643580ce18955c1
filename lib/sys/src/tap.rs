//! Tap devices: made for somebody else to open, and opened.

use std::ffi::c_ulong;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::ioctl::{self, Setter};

const TUN: &str = "/dev/net/tun";

/// Longest name of a network device, without the terminating zero.
pub const NAME_MAX: usize = 15;

// From <linux/if_tun.h>.
const TUNSETIFF: ioctl::Opcode = ioctl::opcode::write::<libc::c_int>(b'T', 202);
const TUNSETPERSIST: ioctl::Opcode = ioctl::opcode::write::<libc::c_int>(b'T', 203);
const TUNSETOWNER: ioctl::Opcode = ioctl::opcode::write::<libc::c_int>(b'T', 204);
const TUNSETGROUP: ioctl::Opcode = ioctl::opcode::write::<libc::c_int>(b'T', 206);
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

/// What precedes each frame on an opened tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frames {
    /// Nothing: the bytes are the Ethernet frame.
    Bare,
    /// `struct virtio_net_hdr`, which lets large segments and missing checksums through: what a VMM opens.
    WithVirtioHeader,
}

/// `struct ifreq`, of which these calls read name and flags.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    unused: [u8; 22],
}

/// Makes a tap device in the calling thread's network namespace that stays without anybody holding it, and that
/// user `owner` and group `group` may open without a capability.
pub fn create(name: &str, owner: u32, group: u32) -> io::Result<()> {
    let device = attach(name, Frames::WithVirtioHeader)?;
    integer::<TUNSETOWNER>(&device, owner.into())?;
    integer::<TUNSETGROUP>(&device, group.into())?;
    // Last: until here a crash leaves no device.
    integer::<TUNSETPERSIST>(&device, 1)
}

/// Opens a tap device of the calling thread's network namespace; it is made, for as long as the descriptor lives, if
/// there is none of this name. `EBUSY`: somebody holds it.
pub fn open(name: &str, frames: Frames) -> io::Result<OwnedFd> {
    attach(name, frames).map(OwnedFd::from)
}

fn attach(name: &str, frames: Frames) -> io::Result<File> {
    let mut request = Request { name: [0; 16], flags: IFF_TAP | IFF_NO_PI, unused: [0; 22] };
    if name.is_empty() || name.len() > NAME_MAX || name.bytes().any(|b| b == 0 || b == b'/' || b == b'%') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} cannot name a network device"),
        ));
    }
    for (to, from) in request.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    if frames == Frames::WithVirtioHeader {
        request.flags |= IFF_VNET_HDR;
    }
    let device = OpenOptions::new().read(true).write(true).open(TUN)?;
    // SAFETY: TUNSETIFF reads a struct ifreq, which `Request` is.
    let call = unsafe { Setter::<TUNSETIFF, Request>::new(request) };
    // SAFETY: the descriptor is /dev/net/tun's, to which the call belongs; the kernel copies the request.
    unsafe { ioctl::ioctl(&device, call) }?;
    Ok(device)
}

/// One of the calls whose argument is a number, not a pointer.
fn integer<const CALL: ioctl::Opcode>(device: &File, value: c_ulong) -> io::Result<()> {
    // SAFETY: these calls take their argument by value and touch no memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::Ioctl::from(CALL), value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
