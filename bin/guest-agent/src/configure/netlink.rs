//! The few messages of rtnetlink(7) that an interface needs.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const IFLA_ADDRESS: u16 = 1;
const IFLA_MTU: u16 = 4;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// The address serves at once: the host has chosen it, and nobody else on the link has it.
const IFA_F_NODAD: u8 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
const RTNH_F_ONLINK: u32 = 4;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const HEADER: usize = 16;
/// The kernel's parts of a dump are no longer.
const RECEIVE: usize = 32 << 10;

/// An address and the length of its network's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    address: IpAddr,
    length: u8,
}

impl Prefix {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (address, length) = text.split_once('/')?;
        let prefix = Self { address: address.parse().ok()?, length: length.parse().ok()? };
        (prefix.length <= prefix.bits()).then_some(prefix)
    }

    pub(crate) fn contains(&self, other: &IpAddr) -> bool {
        let shift = u32::from(128 - self.length);
        let number = |address: &IpAddr| match address {
            // Aligned to the top, so that both families shift alike.
            IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
            IpAddr::V6(address) => address.to_bits(),
        };
        let network = |address: &IpAddr| number(address).checked_shr(shift).unwrap_or(0);
        self.address.is_ipv4() == other.is_ipv4() && network(&self.address) == network(other)
    }

    pub(crate) fn is_link_local(&self) -> bool {
        matches!(self.address, IpAddr::V6(address) if address.is_unicast_link_local())
    }

    fn bits(&self) -> u8 {
        if self.address.is_ipv4() { 32 } else { 128 }
    }
}

/// Whether the gateway is reached although no own network contains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    ByNetwork,
    OnLink,
}

impl From<bool> for Reach {
    fn from(on_link: bool) -> Self {
        if on_link { Self::OnLink } else { Self::ByNetwork }
    }
}

#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0 })
    }

    pub(crate) fn bring_up(&mut self, index: u32, mtu: Option<u32>) -> io::Result<()> {
        // struct ifinfomsg: family, padding, type, index, flags, which flags.
        let mut body = Body::new(&[0, 0, 0, 0]);
        body.number(index).number(IFF_UP).number(IFF_UP);
        if let Some(mtu) = mtu {
            body.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
        self.ask(RTM_NEWLINK, NLM_F_ACK, body)
    }

    pub(crate) fn take_down(&mut self, index: u32) -> io::Result<()> {
        let mut body = Body::new(&[0, 0, 0, 0]);
        body.number(index).number(0).number(IFF_UP);
        self.ask(RTM_NEWLINK, NLM_F_ACK, body)
    }

    /// Of a device that is down.
    pub(crate) fn set_mac(&mut self, index: u32, mac: [u8; 6]) -> io::Result<()> {
        let mut body = Body::new(&[0, 0, 0, 0]);
        body.number(index).number(0).number(0).attribute(IFLA_ADDRESS, &mac);
        self.ask(RTM_NEWLINK, NLM_F_ACK, body)
    }

    pub(crate) fn add_address(&mut self, index: u32, prefix: &Prefix) -> io::Result<()> {
        self.ask(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, address_body(index, prefix))
    }

    pub(crate) fn remove_address(&mut self, index: u32, prefix: &Prefix) -> io::Result<()> {
        self.ask(RTM_DELADDR, NLM_F_ACK, address_body(index, prefix))
    }

    pub(crate) fn addresses(&mut self, index: u32) -> io::Result<Vec<Prefix>> {
        // struct ifaddrmsg, of any family.
        let mut body = Body::new(&[0, 0, 0, 0]);
        body.number(0);
        let mut found = Vec::new();
        self.exchange(RTM_GETADDR, NLM_F_DUMP, body, |message| {
            found.extend(
                parse_address(message).filter(|(owner, _)| *owner == index).map(|(_, prefix)| prefix),
            );
        })?;
        Ok(found)
    }

    pub(crate) fn set_default_route(&mut self, index: u32, gateway: &IpAddr, reach: Reach) -> io::Result<()> {
        // struct rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type, flags.
        let family = family(gateway);
        let mut body = Body::new(&[family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_BOOT, 0, RTN_UNICAST]);
        body.number(match reach {
            Reach::ByNetwork => 0,
            Reach::OnLink => RTNH_F_ONLINK,
        });
        body.attribute(RTA_OIF, &index.to_ne_bytes()).attribute(RTA_GATEWAY, &octets(gateway));
        self.ask(RTM_NEWROUTE, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, body)
    }

    fn ask(&mut self, kind: u16, flags: u16, body: Body) -> io::Result<()> {
        self.exchange(kind, flags, body, |_| ())
    }

    /// Sends a message and reads answers up to the last one.
    fn exchange(
        &mut self,
        kind: u16,
        flags: u16,
        body: Body,
        mut answer: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.sequence += 1;
        let length = (HEADER + body.0.len()) as u32;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(&body.0);
        sendto(&self.socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut buffer = vec![0; RECEIVE];
        loop {
            let (count, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = buffer.get(..count).unwrap_or_default();
            while let Some((kind, sequence, body, after)) = split_message(rest) {
                rest = after;
                match kind {
                    _ if sequence != self.sequence => {}
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => {
                        let errno = body.first_chunk::<4>().map_or(0, |code| i32::from_ne_bytes(*code));
                        return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-errno)) };
                    }
                    _ => answer(body),
                }
            }
        }
    }
}

/// A message without its header.
struct Body(Vec<u8>);

impl Body {
    fn new(start: &[u8]) -> Self {
        Self(start.to_vec())
    }

    fn number(&mut self, number: u32) -> &mut Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.0.extend_from_slice(&((value.len() + 4) as u16).to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

fn address_body(index: u32, prefix: &Prefix) -> Body {
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    let mut body = Body::new(&[family(&prefix.address), prefix.length, IFA_F_NODAD, 0]);
    let octets = octets(&prefix.address);
    body.number(index).attribute(IFA_LOCAL, &octets).attribute(IFA_ADDRESS, &octets);
    body
}

/// Type, sequence number and body of the first message, and what follows it.
fn split_message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let sequence = u32::from_ne_bytes(*bytes.get(8..)?.first_chunk()?);
    let body = bytes.get(HEADER..length)?;
    Some((kind, sequence, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Interface and address of one part of a dump.
fn parse_address(body: &[u8]) -> Option<(u32, Prefix)> {
    let (header, mut attributes) = body.split_at_checked(8)?;
    let length = *header.get(1)?;
    let index = u32::from_ne_bytes(*header.get(4..)?.first_chunk()?);
    let mut found = None;
    while let Some(size) = attributes.first_chunk().map(|size| usize::from(u16::from_ne_bytes(*size))) {
        let kind = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(4..size)?;
        // With a peer, IFA_LOCAL is the own address; IPv6 has IFA_ADDRESS alone.
        if kind == IFA_LOCAL || (kind == IFA_ADDRESS && found.is_none()) {
            found = match value.len() {
                4 => value.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
                _ => value.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
            };
        }
        attributes = attributes.get(size.next_multiple_of(4)..).unwrap_or_default();
    }
    Some((index, Prefix { address: found?, length }))
}

fn family(address: &IpAddr) -> u8 {
    if address.is_ipv4() { AF_INET } else { AF_INET6 }
}

fn octets(address: &IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_its_addresses_and_no_others() {
        let contains =
            |prefix: &str, address: &str| Prefix::parse(prefix).unwrap().contains(&address.parse().unwrap());
        assert!(contains("10.0.2.15/24", "10.0.2.2"));
        assert!(!contains("10.0.2.15/24", "10.0.3.2"));
        assert!(contains("0.0.0.0/0", "8.8.8.8"));
        assert!(!contains("10.0.2.15/32", "10.0.2.2"));
        assert!(contains("fd00::15/64", "fd00::1"));
        assert!(!contains("fd00::15/64", "fd01::1"));
        assert!(!contains("0.0.0.0/0", "::1"));
    }

    #[test]
    fn the_kernel_s_own_loopback_address_is_read() {
        let mut netlink = Netlink::open().unwrap();
        let addresses = netlink.addresses(1).unwrap();
        assert!(addresses.contains(&Prefix::parse("127.0.0.1/8").unwrap()), "{addresses:?}");
    }

    #[test]
    fn the_kernel_s_refusal_is_an_error() {
        let mut netlink = Netlink::open().unwrap();
        let error = netlink.add_address(0x7fff_fff0, &Prefix::parse("10.9.8.7/24").unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NODEV.raw_os_error()));
    }
}
