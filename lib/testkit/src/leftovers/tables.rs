//! The names of the nftables tables of the calling thread's network namespace, asked of the kernel itself.

use std::io;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

// From <linux/netlink.h>, <linux/netfilter/nfnetlink.h> and <linux/netfilter/nf_tables.h>.
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NFT_MSG_GETTABLE: u16 = 10 << 8 | 1;
const NFTA_TABLE_NAME: u16 = 1;
/// Of a message, and of what stands between it and its attributes.
const HEADER: usize = 16;
const NFNETLINK_HEADER: usize = 4;

/// Of all families. Whoever may not ask has none of his own: then there are none.
pub(super) fn names() -> io::Result<Vec<String>> {
    let kind = (SocketType::RAW, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind.0, kind.1, Some(netlink::NETFILTER))?;
    let mut request = Vec::new();
    request.extend(((HEADER + NFNETLINK_HEADER) as u32).to_ne_bytes());
    request.extend(NFT_MSG_GETTABLE.to_ne_bytes());
    request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    request.extend([0; 8 + NFNETLINK_HEADER]);
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let (mut names, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let (length, _) = rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        while let Some((kind, body, after)) = message(rest) {
            match kind {
                NLMSG_DONE => return Ok(names),
                NLMSG_ERROR => return refusal(body).map(|()| names),
                _ => names.extend(name(body.get(NFNETLINK_HEADER..).unwrap_or_default())),
            }
            rest = after;
        }
        if length == 0 {
            return Ok(names);
        }
    }
}

fn refusal(body: &[u8]) -> io::Result<()> {
    let number = body.first_chunk().map_or(0, |bytes| -i32::from_ne_bytes(*bytes));
    match io::Error::from_raw_os_error(number) {
        error if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        error => Err(error),
    }
}

/// The first message: its kind, what is in it, and what follows it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(HEADER..length)?;
    Some((kind, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn name(mut attributes: &[u8]) -> Option<String> {
    while let (Some(length), Some(kind)) =
        (attributes.first_chunk::<2>(), attributes.get(2..).and_then(<[u8]>::first_chunk::<2>))
    {
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes(*kind) == NFTA_TABLE_NAME {
            return Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned());
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}
