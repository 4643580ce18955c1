//! Devices, addresses, routes and neighbours of one network namespace, over rtnetlink.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use ipnet::IpNet;
use rustix::io::Errno;
use rustix::net::Protocol;

use super::{Attributes, Message, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkError, Socket, attributes};
use crate::spec::{Mac, TapOwner};

// From <linux/rtnetlink.h>, <linux/if_link.h>, <linux/if_addr.h>, <linux/neighbour.h>, <linux/veth.h>.
/// The protocol number 0, which this type has no other way to say.
const NETLINK_ROUTE: Option<Protocol> = None;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 0x02;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_TABLE: u16 = 15;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;
const IFF_UP: u32 = 1;
const IF_OPER_UP: u8 = 6;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;
const NEIGHBOUR_HEADER: usize = 12;

/// One namespace's devices and what hangs on them.
pub(crate) struct Routing(Socket);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundLink {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) kind: FoundKind,
    pub(crate) mac: Option<Mac>,
    pub(crate) mtu: u32,
    pub(crate) up: bool,
    pub(crate) operational: bool,
    pub(crate) alias: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FoundKind {
    Tap(TapOwner),
    Pair,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundRoute {
    pub(crate) to: IpNet,
    pub(crate) via: Option<IpAddr>,
    pub(crate) device: u32,
}

impl Routing {
    /// Of the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self, NetlinkError> {
        Ok(Self(Socket::open(NETLINK_ROUTE)?))
    }

    pub(crate) fn links(&mut self) -> Result<Vec<FoundLink>, NetlinkError> {
        let request = Message { kind: RTM_GETLINK, flags: 0, body: vec![0; LINK_HEADER] };
        let parts = self.0.dump(&request)?;
        Ok(parts
            .iter()
            .filter(|(kind, _)| *kind == RTM_NEWLINK)
            .filter_map(|(_, body)| read_link(body))
            .collect())
    }

    /// The addresses of each device, by its index; without those that the kernel makes of link-local networks.
    pub(crate) fn addresses(&mut self) -> Result<BTreeMap<u32, Vec<IpNet>>, NetlinkError> {
        let parts = self.0.dump(&Message { kind: RTM_GETADDR, flags: 0, body: vec![0; ADDRESS_HEADER] })?;
        let mut found: BTreeMap<u32, Vec<IpNet>> = BTreeMap::new();
        for (_, body) in parts.iter().filter(|(kind, _)| *kind == RTM_NEWADDR) {
            let Some((device, address)) = read_address(body) else { continue };
            let by_kernel = matches!(address, IpNet::V6(net) if net.addr().is_unicast_link_local());
            if !by_kernel {
                found.entry(device).or_default().push(address);
            }
        }
        Ok(found)
    }

    /// The unicast routes of the main table.
    pub(crate) fn routes(&mut self) -> Result<Vec<FoundRoute>, NetlinkError> {
        let parts = self.0.dump(&Message { kind: RTM_GETROUTE, flags: 0, body: vec![0; ROUTE_HEADER] })?;
        Ok(parts
            .iter()
            .filter(|(kind, _)| *kind == RTM_NEWROUTE)
            .filter_map(|(_, body)| read_route(body))
            .collect())
    }

    /// The neighbours that are known for good: device, address, MAC.
    pub(crate) fn neighbours(&mut self) -> Result<Vec<(u32, IpAddr, Mac)>, NetlinkError> {
        let parts =
            self.0.dump(&Message { kind: RTM_GETNEIGH, flags: 0, body: vec![0; NEIGHBOUR_HEADER] })?;
        Ok(parts
            .iter()
            .filter(|(kind, _)| *kind == RTM_NEWNEIGH)
            .filter_map(|(_, body)| read_neighbour(body))
            .collect())
    }

    pub(crate) fn index_of(&mut self, name: &str) -> Result<Option<u32>, NetlinkError> {
        Ok(self.links()?.into_iter().find(|link| link.name == name).map(|link| link.index))
    }

    /// Whether the device is up and so is what it leads to.
    pub(crate) fn passes_packets(&mut self, name: &str) -> Result<bool, NetlinkError> {
        Ok(self.links()?.iter().any(|link| link.name == name && link.operational))
    }

    /// Makes two devices that are each other's far end, `far` in another namespace.
    pub(crate) fn make_pair(
        &mut self,
        near: &str,
        far: &str,
        far_namespace: BorrowedFd<'_>,
    ) -> Result<(), NetlinkError> {
        let peer = Attributes::after(&[0; LINK_HEADER])
            .text(IFLA_IFNAME, far)
            .bytes(IFLA_NET_NS_FD, &far_namespace.as_raw_fd().to_ne_bytes());
        let info = Attributes::default()
            .text(IFLA_INFO_KIND, "veth")
            .nest(IFLA_INFO_DATA, Attributes::default().nest(VETH_INFO_PEER, peer));
        let body = Attributes::after(&[0; LINK_HEADER]).text(IFLA_IFNAME, near).nest(IFLA_LINKINFO, info);
        self.0.request(Message {
            kind: RTM_NEWLINK,
            flags: NLM_F_CREATE | NLM_F_EXCL,
            body: body.into_bytes(),
        })
    }

    /// Removes a device, and its far end; success if there is none.
    pub(crate) fn remove_device(&mut self, name: &str) -> Result<(), NetlinkError> {
        let body = Attributes::after(&[0; LINK_HEADER]).text(IFLA_IFNAME, name).into_bytes();
        match self.0.request(Message { kind: RTM_DELLINK, flags: 0, body }) {
            Err(error) if error.is(Errno::NODEV) => Ok(()),
            outcome => outcome,
        }
    }

    /// MAC address, MTU, alias; and up.
    pub(crate) fn set_device(
        &mut self,
        name: &str,
        mac: Mac,
        mtu: u32,
        alias: Option<&str>,
    ) -> Result<(), NetlinkError> {
        let mut header = vec![0; LINK_HEADER - 8];
        header.extend(IFF_UP.to_ne_bytes());
        header.extend(IFF_UP.to_ne_bytes());
        let mut body = Attributes::after(&header)
            .text(IFLA_IFNAME, name)
            .bytes(IFLA_ADDRESS, &mac.0)
            .bytes(IFLA_MTU, &mtu.to_ne_bytes());
        if let Some(alias) = alias {
            body = body.bytes(IFLA_IFALIAS, alias.as_bytes());
        }
        self.0.request(Message { kind: RTM_SETLINK, flags: 0, body: body.into_bytes() })
    }

    /// Success if the device has the address already.
    pub(crate) fn add_address(&mut self, device: u32, address: IpNet) -> Result<(), NetlinkError> {
        // Nobody else is on these links, so nobody is asked whether the address is free.
        let body = address_body(device, address).bytes(IFA_FLAGS, &IFA_F_NODAD.to_ne_bytes());
        self.0.request(Message {
            kind: RTM_NEWADDR,
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            body: body.into_bytes(),
        })
    }

    /// Success if the device does not have the address.
    pub(crate) fn remove_address(&mut self, device: u32, address: IpNet) -> Result<(), NetlinkError> {
        let body = address_body(device, address).into_bytes();
        match self.0.request(Message { kind: RTM_DELADDR, flags: 0, body }) {
            Err(error) if error.is(Errno::ADDRNOTAVAIL) => Ok(()),
            outcome => outcome,
        }
    }

    pub(crate) fn set_route(&mut self, to: IpNet, via: IpAddr, device: u32) -> Result<(), NetlinkError> {
        let header = [
            family_of(to.addr()),
            to.prefix_len(),
            0,
            0,
            RT_TABLE_MAIN,
            RTPROT_STATIC,
            0,
            RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        let mut body = Attributes::after(&header);
        if to.prefix_len() > 0 {
            body = body.bytes(RTA_DST, &octets(to.network()));
        }
        let body = body.bytes(RTA_GATEWAY, &octets(via)).bytes(RTA_OIF, &device.to_ne_bytes());
        self.0.request(Message {
            kind: RTM_NEWROUTE,
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            body: body.into_bytes(),
        })
    }

    pub(crate) fn set_neighbour(
        &mut self,
        device: u32,
        address: IpAddr,
        mac: Mac,
    ) -> Result<(), NetlinkError> {
        let mut header = vec![family_of(address), 0, 0, 0];
        header.extend(device.to_ne_bytes());
        header.extend(NUD_PERMANENT.to_ne_bytes());
        header.extend([0, 0]);
        let body = Attributes::after(&header).bytes(NDA_DST, &octets(address)).bytes(NDA_LLADDR, &mac.0);
        self.0.request(Message {
            kind: RTM_NEWNEIGH,
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            body: body.into_bytes(),
        })
    }
}

fn address_body(device: u32, address: IpNet) -> Attributes {
    let mut header = vec![family_of(address.addr()), address.prefix_len(), 0, 0];
    header.extend(device.to_ne_bytes());
    Attributes::after(&header)
        .bytes(IFA_LOCAL, &octets(address.addr()))
        .bytes(IFA_ADDRESS, &octets(address.addr()))
}

fn read_link(body: &[u8]) -> Option<FoundLink> {
    let header = body.get(..LINK_HEADER)?;
    let mut link = FoundLink {
        index: number_at(header, 4)?,
        name: String::new(),
        kind: FoundKind::Other,
        mac: None,
        mtu: 0,
        up: number_at(header, 8)? & IFF_UP != 0,
        operational: false,
        alias: None,
    };
    for (kind, value) in attributes(body.get(LINK_HEADER..)?) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_ADDRESS => link.mac = value.try_into().ok().map(Mac),
            IFLA_MTU => link.mtu = number_at(value, 0)?,
            IFLA_OPERSTATE => link.operational = value == [IF_OPER_UP],
            IFLA_IFALIAS => link.alias = Some(text(value)),
            IFLA_LINKINFO => link.kind = read_kind(value),
            _ => {}
        }
    }
    Some(link)
}

fn read_kind(info: &[u8]) -> FoundKind {
    let find = |wanted| attributes(info).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    match find(IFLA_INFO_KIND).map(text).as_deref() {
        Some("veth") => FoundKind::Pair,
        Some("tun") => {
            // Without an owner or group the attribute is missing.
            let mut owner = TapOwner { user: u32::MAX, group: u32::MAX };
            for (kind, value) in attributes(find(IFLA_INFO_DATA).unwrap_or_default()) {
                match kind {
                    IFLA_TUN_OWNER => owner.user = number_at(value, 0).unwrap_or(u32::MAX),
                    IFLA_TUN_GROUP => owner.group = number_at(value, 0).unwrap_or(u32::MAX),
                    _ => {}
                }
            }
            FoundKind::Tap(owner)
        }
        Some(_) | None => FoundKind::Other,
    }
}

fn read_address(body: &[u8]) -> Option<(u32, IpNet)> {
    let [family, prefix, ..] = *body else { return None };
    let device = number_at(body, 4)?;
    let find = |wanted| attributes(body.get(ADDRESS_HEADER..)?).find(|(k, _)| *k == wanted).map(|(_, v)| v);
    let address = address_of(family, find(IFA_LOCAL).or_else(|| find(IFA_ADDRESS))?)?;
    Some((device, IpNet::new(address, prefix).ok()?))
}

fn read_route(body: &[u8]) -> Option<FoundRoute> {
    let [family, prefix, _, _, table, _, _, kind, ..] = *body else { return None };
    let find = |wanted| attributes(body.get(ROUTE_HEADER..)?).find(|(k, _)| *k == wanted).map(|(_, v)| v);
    let table = find(RTA_TABLE).and_then(|value| number_at(value, 0)).unwrap_or(table.into());
    if table != u32::from(RT_TABLE_MAIN) || kind != RTN_UNICAST {
        return None;
    }
    let to = match find(RTA_DST) {
        Some(bytes) => address_of(family, bytes)?,
        None if family == AF_INET => Ipv4Addr::UNSPECIFIED.into(),
        None if family == AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
        None => return None,
    };
    Some(FoundRoute {
        to: IpNet::new(to, prefix).ok()?,
        via: find(RTA_GATEWAY).and_then(|bytes| address_of(family, bytes)),
        // A route over several devices has none of its own; it counts all the same.
        device: find(RTA_OIF).and_then(|bytes| number_at(bytes, 0)).unwrap_or_default(),
    })
}

fn read_neighbour(body: &[u8]) -> Option<(u32, IpAddr, Mac)> {
    let family = *body.first()?;
    let state = body.get(8..10).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes)?;
    let find = |wanted| attributes(body.get(NEIGHBOUR_HEADER..)?).find(|(k, _)| *k == wanted).map(|(_, v)| v);
    if state != NUD_PERMANENT {
        return None;
    }
    let mac = find(NDA_LLADDR)?.try_into().ok().map(Mac)?;
    Some((number_at(body, 4)?, address_of(family, find(NDA_DST)?)?, mac))
}

fn number_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map(|four| u32::from_ne_bytes(*four))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

fn family_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => AF_INET,
        IpAddr::V6(_) => AF_INET6,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

fn address_of(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        AF_INET6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}
