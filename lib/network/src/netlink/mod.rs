//! A netlink socket: requests that are answered, dumps that are whole, batches that happen entirely or not at all.

mod attributes;
pub(crate) mod route;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, sockopt};

pub(crate) use attributes::{Attributes, attributes};

// From <linux/netlink.h>.
pub(crate) const NLM_F_REQUEST: u16 = 0x1;
pub(crate) const NLM_F_ACK: u16 = 0x4;
pub(crate) const NLM_F_EXCL: u16 = 0x200;
pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_REPLACE: u16 = 0x100;
pub(crate) const NLM_F_APPEND: u16 = 0x800;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_CAPPED: u16 = 0x100;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSGERR_ATTR_MSG: u16 = 1;
const HEADER: usize = 16;

/// The kernel answers at once; this bounds a kernel that does not.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a dump begins anew because what it lists changed meanwhile.
const DUMP_ATTEMPTS: u32 = 8;

#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    #[error("cannot open a netlink socket")]
    Open { source: io::Error },
    #[error("cannot send to the kernel over netlink")]
    Send { source: io::Error },
    #[error("no answer of the kernel over netlink")]
    Receive { source: io::Error },
    #[error("the kernel refused{}", said.as_ref().map(|s| format!(": {s}")).unwrap_or_default())]
    Refused { said: Option<String>, source: io::Error },
    #[error("the kernel's answer over netlink is not understood")]
    Malformed,
    #[error("what was listed over netlink kept changing")]
    Restless,
}

impl NetlinkError {
    fn errno(&self) -> Option<rustix::io::Errno> {
        match self {
            Self::Refused { source, .. } => rustix::io::Errno::from_io_error(source),
            Self::Open { .. }
            | Self::Send { .. }
            | Self::Receive { .. }
            | Self::Malformed
            | Self::Restless => None,
        }
    }

    pub(crate) fn is(&self, errno: rustix::io::Errno) -> bool {
        self.errno() == Some(errno)
    }
}

/// One message, without its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) body: Vec<u8>,
}

pub(crate) struct Socket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

/// Type and body of one message of a dump.
pub(crate) type Part = (u16, Vec<u8>);

/// What came with one message from the kernel.
struct Answer<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

impl Socket {
    /// A socket of the calling thread's network namespace, which it stays in.
    pub(crate) fn open(protocol: Option<Protocol>) -> Result<Self, NetlinkError> {
        let open = || -> io::Result<OwnedFd> {
            let socket = rustix::net::socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                protocol,
            )?;
            rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
            rustix::net::connect(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
            imp_sys::netlink::explain_errors(&socket)?;
            Ok(socket)
        };
        let socket = open().map_err(|source| NetlinkError::Open { source })?;
        // Room for a large rule set in one batch, and for its answers; without the privilege the default must do.
        let _ = sockopt::set_socket_send_buffer_size_force(&socket, 1 << 20);
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, 1 << 20);
        Ok(Self { socket, sequence: 0, buffer: vec![0; 1 << 17] })
    }

    /// Sends one message and waits until the kernel has done it.
    pub(crate) fn request(&mut self, message: Message) -> Result<(), NetlinkError> {
        self.batch(&[Message { flags: message.flags | NLM_F_ACK, ..message }])
    }

    /// Sends the messages as one datagram and waits for the answer to the last one that asks for an answer, or for
    /// the first refusal.
    pub(crate) fn batch(&mut self, messages: &[Message]) -> Result<(), NetlinkError> {
        let mut bytes = Vec::new();
        let first = self.sequence.wrapping_add(1);
        let mut awaited = first;
        for message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            if message.flags & NLM_F_ACK != 0 {
                awaited = self.sequence;
            }
            write_message(&mut bytes, message, self.sequence)?;
        }
        self.send(&bytes)?;
        let last = self.sequence;
        let ours = |sequence: u32| sequence.wrapping_sub(first) <= last.wrapping_sub(first);
        loop {
            let mut outcome = None;
            self.receive(|answer| {
                if answer.kind == NLMSG_ERROR && ours(answer.sequence) && outcome.is_none() {
                    match refusal(&answer)? {
                        Some(error) => outcome = Some(Err(error)),
                        None if answer.sequence == awaited => outcome = Some(Ok(())),
                        None => {}
                    }
                }
                Ok(())
            })?;
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }

    /// Everything that the kernel lists in answer to one message.
    pub(crate) fn dump(&mut self, message: &Message) -> Result<Vec<Part>, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            if let Some(parts) = self.dump_once(message)? {
                return Ok(parts);
            }
        }
        Err(NetlinkError::Restless)
    }

    /// Nothing, if the listing was cut short by a change.
    fn dump_once(&mut self, message: &Message) -> Result<Option<Vec<Part>>, NetlinkError> {
        self.sequence = self.sequence.wrapping_add(1);
        let sequence = self.sequence;
        let mut bytes = Vec::new();
        let message = Message { flags: message.flags | NLM_F_DUMP, ..message.clone() };
        write_message(&mut bytes, &message, sequence)?;
        self.send(&bytes)?;
        let (mut parts, mut interrupted, mut end) = (Vec::new(), false, None);
        while end.is_none() {
            self.receive(|answer| {
                if answer.sequence != sequence || end.is_some() {
                    return Ok(());
                }
                interrupted |= answer.flags & NLM_F_DUMP_INTR != 0;
                match answer.kind {
                    NLMSG_DONE => end = Some(Ok(())),
                    NLMSG_ERROR => end = Some(refusal(&answer)?.map_or(Ok(()), Err)),
                    kind => parts.push((kind, answer.body.to_vec())),
                }
                Ok(())
            })?;
        }
        match end {
            // nf_tables says so by an error instead of a flag.
            Some(Err(error)) if error.is(rustix::io::Errno::INTR) => Ok(None),
            Some(Err(error)) => Err(error),
            Some(Ok(())) | None => Ok((!interrupted).then_some(parts)),
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<(), NetlinkError> {
        rustix::net::send(&self.socket, bytes, SendFlags::empty())
            .map_err(|errno| NetlinkError::Send { source: errno.into() })?;
        Ok(())
    }

    /// Receives one datagram and hands over its messages.
    fn receive(
        &mut self,
        mut each: impl FnMut(Answer<'_>) -> Result<(), NetlinkError>,
    ) -> Result<(), NetlinkError> {
        let length = loop {
            match rustix::net::recv(&self.socket, self.buffer.as_mut_slice(), RecvFlags::TRUNC) {
                Ok((_, length)) => break length,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(NetlinkError::Receive { source: errno.into() }),
            }
        };
        let mut rest = self.buffer.get(..length).ok_or(NetlinkError::Malformed)?;
        while let Some((header, _)) = rest.split_first_chunk::<HEADER>() {
            let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = *header;
            let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
            let body = rest.get(HEADER..length).ok_or(NetlinkError::Malformed)?;
            each(Answer {
                kind: u16::from_ne_bytes([k0, k1]),
                flags: u16::from_ne_bytes([f0, f1]),
                sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
                body,
            })?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(())
    }
}

fn write_message(bytes: &mut Vec<u8>, message: &Message, sequence: u32) -> Result<(), NetlinkError> {
    let length = u32::try_from(HEADER + message.body.len()).map_err(|_| NetlinkError::Malformed)?;
    bytes.extend(length.to_ne_bytes());
    bytes.extend(message.kind.to_ne_bytes());
    bytes.extend((message.flags | NLM_F_REQUEST).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(&message.body);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    Ok(())
}

/// What an answer of the kind "error" says; the number 0 means that all is well.
fn refusal(answer: &Answer<'_>) -> Result<Option<NetlinkError>, NetlinkError> {
    let (number, rest) = answer.body.split_first_chunk::<4>().ok_or(NetlinkError::Malformed)?;
    let number = i32::from_ne_bytes(*number);
    if number == 0 {
        return Ok(None);
    }
    // Then follow the request's header and, unless the answer is capped, its body; then the attributes.
    let (length, _) = rest.split_first_chunk::<4>().ok_or(NetlinkError::Malformed)?;
    let echoed = match answer.flags & NLM_F_CAPPED {
        0 => (u32::from_ne_bytes(*length) as usize).next_multiple_of(4),
        _ => HEADER,
    };
    let said = attributes(rest.get(echoed..).unwrap_or_default())
        .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
        .map(|(_, text)| String::from_utf8_lossy(text).trim_end_matches('\0').to_owned());
    Ok(Some(NetlinkError::Refused { said, source: io::Error::from_raw_os_error(-number) }))
}
