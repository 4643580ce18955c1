//! What is wanted of a VM's network, as types that cannot contradict themselves.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::addresses::{Link, Pool};
use crate::egress::Egress;
use crate::names::{SiteName, VmName};

/// What all VM networks of one owner on one machine share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    pub name: SiteName,
    /// Where the uplinks' addresses come from.
    pub pool: Pool,
    pub outside: Outside,
    /// Of taps and uplinks, in bytes; at most what leaves the host unfragmented.
    pub mtu: u32,
    /// Connections that a VM may have open at once; further ones are dropped. The host remembers every one of them in a
    /// table that all VMs share.
    pub connections: u32,
}

/// Under which address a VM is seen outside the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outside {
    /// The host's own.
    Masquerade,
    /// Its uplink's: somebody routes the pool to this host.
    Routed,
}

/// The network of one VM. Its owner keeps it on disk, to take the network over after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    pub vm: VmName,
    /// Its uplink's addresses, leased from the site's pool.
    pub link: Link,
    pub tap: TapOwner,
    pub guest: Guest,
    pub publish: Vec<Publish>,
    pub egress: Egress,
}

/// Who may open the tap: the user and group that the VMM runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapOwner {
    pub user: u32,
    pub group: u32,
}

/// The guest's end. The same in many VMs, if they come from one snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "GuestText", into = "GuestText")]
pub struct Guest {
    mac: Mac,
    ipv4: Inside<Ipv4Net, Ipv4Addr>,
    ipv6: Option<Inside<Ipv6Net, Ipv6Addr>>,
}

/// A guest's address with its network, and the gateway in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inside<Net, Address> {
    address: Net,
    gateway: Address,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    #[error("MAC address {mac} is a group's; a guest's has an even first byte")]
    GroupMac { mac: Mac },
    #[error("MAC address {mac} is the gateway's")]
    GatewayMac { mac: Mac },
    #[error(
        "{address} is not an address that a guest can have with gateway {gateway}: both are hosts of {network}, and not the same"
    )]
    Address { address: IpAddr, gateway: IpAddr, network: ipnet::IpNet },
}

impl Guest {
    /// A guest with IPv4 alone: everything of IPv6 is dropped.
    pub fn ipv4(mac: Mac, address: Ipv4Net, gateway: Ipv4Addr) -> Result<Self, GuestError> {
        if mac.0.first().is_some_and(|b| b & 1 == 1) {
            return Err(GuestError::GroupMac { mac });
        }
        if mac == Mac::GATEWAY {
            return Err(GuestError::GatewayMac { mac });
        }
        let is_host = |a: Ipv4Addr| {
            address.contains(&a)
                && !a.is_multicast()
                && !a.is_unspecified()
                && !a.is_loopback()
                && (address.prefix_len() >= 31 || (a != address.network() && a != address.broadcast()))
        };
        if !is_host(address.addr()) || !is_host(gateway) || address.addr() == gateway {
            return Err(GuestError::Address {
                address: address.addr().into(),
                gateway: gateway.into(),
                network: address.trunc().into(),
            });
        }
        Ok(Self { mac, ipv4: Inside { address, gateway }, ipv6: None })
    }

    /// The same guest with IPv6 too, which leaves the host's namespace translated, like IPv4.
    pub fn and_ipv6(mut self, address: Ipv6Net, gateway: Ipv6Addr) -> Result<Self, GuestError> {
        let is_host = |a: Ipv6Addr| {
            address.contains(&a)
                && !a.is_multicast()
                && !a.is_unspecified()
                && !a.is_loopback()
                && !a.is_unicast_link_local()
                && a.to_ipv4_mapped().is_none()
        };
        if !is_host(address.addr()) || !is_host(gateway) || address.addr() == gateway {
            return Err(GuestError::Address {
                address: address.addr().into(),
                gateway: gateway.into(),
                network: address.trunc().into(),
            });
        }
        self.ipv6 = Some(Inside { address, gateway });
        Ok(self)
    }

    pub fn mac(&self) -> Mac {
        self.mac
    }

    pub fn address(&self) -> Ipv4Addr {
        self.ipv4.address.addr()
    }

    /// The gateway with the network's prefix length: the tap's address. Also the guest's name server.
    pub fn gateway(&self) -> Ipv4Net {
        with_prefix_of(self.ipv4.gateway, self.ipv4.address)
    }

    pub fn address6(&self) -> Option<Ipv6Addr> {
        self.ipv6.map(|inside| inside.address.addr())
    }

    pub fn gateway6(&self) -> Option<Ipv6Net> {
        let inside = self.ipv6?;
        Ipv6Net::new(inside.gateway, inside.address.prefix_len()).ok()
    }
}

/// A guest as it is written down, before it is believed.
#[derive(Serialize, Deserialize)]
struct GuestText {
    mac: Mac,
    ipv4: (Ipv4Net, Ipv4Addr),
    ipv6: Option<(Ipv6Net, Ipv6Addr)>,
}

impl TryFrom<GuestText> for Guest {
    type Error = GuestError;

    fn try_from(text: GuestText) -> Result<Self, GuestError> {
        let guest = Self::ipv4(text.mac, text.ipv4.0, text.ipv4.1)?;
        match text.ipv6 {
            Some((address, gateway)) => guest.and_ipv6(address, gateway),
            None => Ok(guest),
        }
    }
}

impl From<Guest> for GuestText {
    fn from(guest: Guest) -> Self {
        Self {
            mac: guest.mac,
            ipv4: (guest.ipv4.address, guest.ipv4.gateway),
            ipv6: guest.ipv6.map(|inside| (inside.address, inside.gateway)),
        }
    }
}

fn with_prefix_of(address: Ipv4Addr, net: Ipv4Net) -> Ipv4Net {
    Ipv4Net::new(address, net.prefix_len()).unwrap_or(net)
}

/// A port of the guest that is reached through the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Publish {
    pub transport: Transport,
    pub on: PublishOn,
    pub host_port: u16,
    pub guest_port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PublishOn {
    /// Every IPv4 address of the host, 127.0.0.1 included.
    AnyIpv4,
    /// Every IPv6 address of the host but ::1, from which the kernel routes nothing to another device.
    AnyIpv6,
    /// This address of the host.
    Address(IpAddr),
}

impl Publish {
    /// Whether both would answer at one address and port.
    pub fn collides_with(&self, other: &Self) -> bool {
        let same_address = match (self.on, other.on) {
            (PublishOn::Address(a), PublishOn::Address(b)) => a == b,
            (PublishOn::AnyIpv4 | PublishOn::AnyIpv6, _) | (_, PublishOn::AnyIpv4 | PublishOn::AnyIpv6) => {
                self.is_ipv6() == other.is_ipv6()
            }
        };
        same_address && self.transport == other.transport && self.host_port == other.host_port
    }

    /// Whether somebody on the host may use 127.0.0.0/8 to reach it.
    pub fn on_loopback(&self) -> bool {
        match self.on {
            PublishOn::AnyIpv4 => true,
            PublishOn::AnyIpv6 => false,
            PublishOn::Address(address) => address.is_ipv4() && address.is_loopback(),
        }
    }

    pub fn is_ipv6(&self) -> bool {
        match self.on {
            PublishOn::AnyIpv4 => false,
            PublishOn::AnyIpv6 => true,
            PublishOn::Address(address) => address.is_ipv6(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    Tcp,
    Udp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// An Ethernet address; as text, six pairs of hex digits with colons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Of every tap: a restored guest still knows its gateway by it.
    pub const GATEWAY: Self = Self([0x02, 0x69, 0x6d, 0x70, 0x00, 0x01]);
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a MAC address (six pairs of hex digits with colons between them)")]
pub struct NotAMac {
    text: String,
}

impl FromStr for Mac {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Self, NotAMac> {
        let not_a_mac = || NotAMac { text: text.to_owned() };
        let byte = |pair: &str| match pair.as_bytes() {
            [a, b] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit() => u8::from_str_radix(pair, 16).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or_else(not_a_mac)
    }
}

impl TryFrom<String> for Mac {
    type Error = NotAMac;

    fn try_from(text: String) -> Result<Self, NotAMac> {
        text.parse()
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if i == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x06, 0, 0, 0, 0, 1]);

    #[test]
    fn a_guest_that_could_not_talk_to_its_gateway_is_refused() {
        for (address, gateway) in [
            ("10.0.0.2/30", "10.0.0.5"),
            ("10.0.0.2/30", "10.0.0.2"),
            ("10.0.0.0/30", "10.0.0.1"),
            ("10.0.0.3/30", "10.0.0.1"),
            ("10.0.0.2/30", "10.0.0.3"),
            ("127.0.0.2/8", "127.0.0.1"),
            ("224.0.0.2/24", "224.0.0.1"),
        ] {
            let made = Guest::ipv4(MAC, address.parse().unwrap(), gateway.parse().unwrap());
            assert!(matches!(made, Err(GuestError::Address { .. })), "{address} {gateway}");
        }
        assert!(Guest::ipv4(MAC, "10.0.0.2/30".parse().unwrap(), "10.0.0.1".parse().unwrap()).is_ok());
    }

    #[test]
    fn a_guest_with_a_groups_mac_or_the_gateways_is_refused() {
        let with = |mac| Guest::ipv4(mac, "10.0.0.2/30".parse().unwrap(), "10.0.0.1".parse().unwrap());
        assert!(matches!(with(Mac([0xff; 6])), Err(GuestError::GroupMac { .. })));
        assert!(matches!(with(Mac::GATEWAY), Err(GuestError::GatewayMac { .. })));
    }

    #[test]
    fn a_link_local_address_is_no_address_of_a_guest() {
        let guest = Guest::ipv4(MAC, "10.0.0.2/30".parse().unwrap(), "10.0.0.1".parse().unwrap()).unwrap();
        assert!(guest.clone().and_ipv6("fe80::2/64".parse().unwrap(), "fe80::1".parse().unwrap()).is_err());
        assert!(guest.and_ipv6("fd00::2/64".parse().unwrap(), "fd00::1".parse().unwrap()).is_ok());
    }

    #[test]
    fn a_mac_address_is_read_as_it_is_written() {
        let text = MAC.to_string();
        assert_eq!((text.as_str(), text.parse()), ("06:00:00:00:00:01", Ok(MAC)));
        for bad in [
            "",
            "06:00:00:00:00",
            "06:00:00:00:00:01:02",
            "6:0:0:0:0:1",
            "06-00-00-00-00-01",
            "0g:00:00:00:00:01",
            "+6:00:00:00:00:01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_guest_that_was_written_down_is_checked_when_it_is_read() {
        let guest = Guest::ipv4(MAC, "10.0.0.2/30".parse().unwrap(), "10.0.0.1".parse().unwrap())
            .and_then(|guest| guest.and_ipv6("fd00::2/64".parse().unwrap(), "fd00::1".parse().unwrap()))
            .unwrap();
        let text = serde_json::to_string(&guest).unwrap();
        assert_eq!(serde_json::from_str::<Guest>(&text).unwrap(), guest);
        for (from, to) in [("10.0.0.2/30", "10.0.0.3/30"), ("fd00::1", "fd01::1"), ("06:00", "07:00")] {
            assert!(serde_json::from_str::<Guest>(&text.replace(from, to)).is_err(), "{to}");
        }
    }
}
