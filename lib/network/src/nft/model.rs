//! Tables, chains, rules and sets, as far as this project uses them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::encode;
use crate::names::DeviceName;
use crate::spec::{Mac, Transport};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub id: TableId,
    pub sets: Vec<Set>,
    pub chains: Vec<Chain>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TableId {
    pub family: Family,
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet,
    /// Everything that one device receives.
    Netdev,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub name: &'static str,
    pub hook: Hook,
    pub policy: Policy,
    pub rules: Vec<Rule>,
}

/// Where packets come through a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Received by this device, before anything else sees them.
    Ingress(DeviceName),
    /// Received, before connection tracking.
    Early,
    /// Received; the first packet of each connection.
    NatIn,
    /// Sent by this machine; the first packet of each connection.
    NatLocal,
    Input,
    Forward,
    /// About to leave; the first packet of each connection.
    NatOut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Accept,
    Drop,
}

/// If all of `matches` hold, `action` happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Shown by `nft list` beside the rule.
    pub why: &'static str,
    pub matches: Vec<Match>,
    pub action: Action,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    Field(Field, Test),
    /// The fields, one behind the other, are an element of the set.
    InSet(Vec<Field>, &'static str),
}

/// What a packet is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    InDevice,
    OutDevice,
    /// IPv4 or IPv6, in tables that see both.
    IpVersion,
    EtherType,
    EtherSource,
    ArpSenderMac,
    ArpSenderAddress,
    Source4,
    Source6,
    Destination4,
    Destination6,
    Transport,
    DestinationPort,
    IcmpType,
    ConnectionState,
    ConnectionStatus,
    /// Whether the destination is an address of this machine.
    DestinationKind,
}

/// How a field is tested; values are as the kernel loads the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    Is(Vec<u8>),
    IsNot(Vec<u8>),
    /// The value and its first so many bits.
    Within(Vec<u8>, u8),
    NotWithin(Vec<u8>, u8),
    Between(Vec<u8>, Vec<u8>),
    /// At least one of these bits.
    AnyOf(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Accept,
    Drop,
    /// Dropped, and the sender is told so.
    Reject,
    Masquerade,
    /// To another address and port.
    SendTo(IpAddr, u16),
    /// To the IPv4 address and port that the map has for the fields; nothing happens if it has none.
    SendByMap(Vec<Field>, &'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    pub name: &'static str,
    pub key: Vec<KeyPart>,
    /// What a map leads to; empty in a set.
    pub data: Vec<KeyPart>,
    /// Elements end by themselves. They are not part of the plan then.
    pub timed: bool,
    /// At most so many elements.
    pub size: u32,
    pub elements: BTreeSet<Element>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyPart {
    Ipv4,
    Ipv6,
    Transport,
    Port,
}

/// One element of a set or map, each part padded to 4 bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    pub key: Vec<u8>,
    pub data: Vec<u8>,
}

/// What can be read back of a table: enough to tell whether somebody changed it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableShape {
    pub chains: BTreeMap<String, ChainShape>,
    pub sets: BTreeSet<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChainShape {
    /// Type, hook, priority, device and policy, as text.
    pub hook: String,
    /// The rules' labels, in order.
    pub rules: Vec<String>,
}

impl Table {
    pub fn shape(&self) -> TableShape {
        let chain = |chain: &Chain| ChainShape {
            hook: chain.hook.describe(chain.policy),
            rules: chain.rules.iter().map(Rule::label).collect(),
        };
        TableShape {
            chains: self.chains.iter().map(|c| (c.name.to_owned(), chain(c))).collect(),
            sets: self.sets.iter().map(|s| s.name.to_owned()).collect(),
        }
    }
}

impl Hook {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Ingress(_) | Self::Early | Self::Input | Self::Forward => "filter",
            Self::NatIn | Self::NatLocal | Self::NatOut => "nat",
        }
    }

    pub(super) fn number(&self) -> u32 {
        match self {
            Self::Ingress(_) | Self::Early | Self::NatIn => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::NatLocal => 3,
            Self::NatOut => 4,
        }
    }

    /// Lower comes first; the usual numbers for the purpose.
    pub(super) fn priority(&self) -> i32 {
        match self {
            Self::Ingress(_) => -500,
            Self::Early => -300,
            Self::NatIn | Self::NatLocal => -100,
            Self::Input | Self::Forward => 0,
            Self::NatOut => 100,
        }
    }

    pub(super) fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::Ingress(device) => Some(device),
            Self::Early | Self::NatIn | Self::NatLocal | Self::Input | Self::Forward | Self::NatOut => None,
        }
    }

    fn describe(&self, policy: Policy) -> String {
        let device = self.device().map_or("", DeviceName::as_str);
        ChainShape::hook_text(self.kind(), self.number(), self.priority(), device, policy.number())
    }
}

impl ChainShape {
    pub(super) fn hook_text(kind: &str, hook: u32, priority: i32, device: &str, policy: u32) -> String {
        format!("{kind} {hook} {priority} {device} {policy}")
    }
}

impl Policy {
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Drop => super::kernel::NF_DROP,
            Self::Accept => super::kernel::NF_ACCEPT,
        }
    }
}

impl Rule {
    pub fn new(why: &'static str, action: Action) -> Self {
        Self { why, matches: Vec::new(), action }
    }

    /// The comment that goes with the rule: why it is there, and a digest of what it does.
    pub(super) fn label(&self) -> String {
        let digest = hex::encode(Sha256::digest(encode::expressions(self)));
        format!("{} [{}]", self.why, digest.get(..8).unwrap_or_default())
    }

    fn with(mut self, field: Field, test: Test) -> Self {
        self.matches.push(Match::Field(field, test));
        self
    }

    pub fn from(self, device: &DeviceName) -> Self {
        self.with(Field::InDevice, Test::Is(whole_name(device.as_str())))
    }

    pub fn to(self, device: &DeviceName) -> Self {
        self.with(Field::OutDevice, Test::Is(whole_name(device.as_str())))
    }

    pub fn from_any(self, prefix: &str) -> Self {
        self.with(Field::InDevice, Test::Is(prefix.into()))
    }

    pub fn to_any(self, prefix: &str) -> Self {
        self.with(Field::OutDevice, Test::Is(prefix.into()))
    }

    pub fn to_none_of(self, prefix: &str) -> Self {
        self.with(Field::OutDevice, Test::IsNot(prefix.into()))
    }

    pub fn ether_source_is_not(self, mac: Mac) -> Self {
        self.with(Field::EtherSource, Test::IsNot(mac.0.into()))
    }

    pub fn ether_type(self, number: u16) -> Self {
        self.with(Field::EtherType, Test::Is(number.to_be_bytes().into()))
    }

    pub fn arp_sender(self, mac: Mac, address: Ipv4Addr) -> Self {
        self.with(Field::ArpSenderMac, Test::Is(mac.0.into()))
            .with(Field::ArpSenderAddress, Test::Is(address.octets().into()))
    }

    pub fn ipv4(self) -> Self {
        self.with(Field::IpVersion, Test::Is(vec![super::kernel::NFPROTO_IPV4]))
    }

    pub fn ipv6(self) -> Self {
        self.with(Field::IpVersion, Test::Is(vec![super::kernel::NFPROTO_IPV6]))
    }

    /// The source, in a table where the IP version is already known.
    pub fn source(self, net: IpNet) -> Self {
        match net {
            IpNet::V4(net) => {
                self.with(Field::Source4, within(net.network().octets().into(), net.prefix_len()))
            }
            IpNet::V6(net) => {
                self.with(Field::Source6, within(net.network().octets().into(), net.prefix_len()))
            }
        }
    }

    /// A source outside of `net`, of the IP version of `net`.
    pub fn source_outside(self, net: IpNet) -> Self {
        let field = match net {
            IpNet::V4(_) => Field::Source4,
            IpNet::V6(_) => Field::Source6,
        };
        let network = match net.network() {
            IpAddr::V4(a) => a.octets().to_vec(),
            IpAddr::V6(a) => a.octets().to_vec(),
        };
        self.family_of(net).with(field, Test::NotWithin(network, net.prefix_len()))
    }

    /// The IP version of `net`.
    pub fn family_of(self, net: IpNet) -> Self {
        match net {
            IpNet::V4(_) => self.ipv4(),
            IpNet::V6(_) => self.ipv6(),
        }
    }

    /// The destination and, in front of it, the IP version.
    pub fn destination(self, net: IpNet) -> Self {
        self.family_of(net).destination_known(net)
    }

    /// The destination, where the IP version is already known.
    pub fn destination_known(self, net: IpNet) -> Self {
        let prefix = net.prefix_len();
        match net {
            IpNet::V4(net) => self.with(Field::Destination4, within(net.network().octets().into(), prefix)),
            IpNet::V6(net) => self.with(Field::Destination6, within(net.network().octets().into(), prefix)),
        }
    }

    pub fn transport(self, transport: Transport) -> Self {
        self.with(Field::Transport, Test::Is(vec![transport.number()]))
    }

    pub fn ports(self, transport: Transport, first: u16, last: u16) -> Self {
        let test = match first == last {
            true => Test::Is(first.to_be_bytes().into()),
            false => Test::Between(first.to_be_bytes().into(), last.to_be_bytes().into()),
        };
        self.transport(transport).with(Field::DestinationPort, test)
    }

    pub fn icmp_echo(self) -> Self {
        self.ipv4().with(Field::Transport, Test::Is(vec![1])).with(Field::IcmpType, Test::Is(vec![8]))
    }

    /// ICMPv6 of one type; the IP version is already known.
    pub fn icmp6(self, kind: u8) -> Self {
        self.with(Field::Transport, Test::Is(vec![58])).with(Field::IcmpType, Test::Is(vec![kind]))
    }

    /// Part of, or related to, a connection that was let through before.
    pub fn established(self) -> Self {
        self.with(Field::ConnectionState, Test::AnyOf(0b110))
    }

    /// Part of no connection, nor the beginning of one.
    pub fn of_no_connection(self) -> Self {
        self.with(Field::ConnectionState, Test::AnyOf(0b1))
    }

    /// Of a connection whose destination was translated.
    pub fn redirected(self) -> Self {
        self.with(Field::ConnectionStatus, Test::AnyOf(1 << 5))
    }

    pub fn to_this_machine(self) -> Self {
        const RTN_LOCAL: u32 = 2;
        self.with(Field::DestinationKind, Test::Is(RTN_LOCAL.to_ne_bytes().into()))
    }

    pub fn in_set(mut self, fields: Vec<Field>, set: &'static str) -> Self {
        self.matches.push(Match::InSet(fields, set));
        self
    }
}

fn within(address: Vec<u8>, prefix: u8) -> Test {
    if usize::from(prefix) == address.len() * 8 { Test::Is(address) } else { Test::Within(address, prefix) }
}

/// As the kernel compares it: to the end, zeros included. Without them it is a prefix.
fn whole_name(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(16, 0);
    bytes
}

impl Transport {
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

impl Element {
    fn key_part(mut self, bytes: &[u8]) -> Self {
        self.key.extend(bytes);
        self.key.resize(self.key.len().next_multiple_of(4), 0);
        self
    }

    pub fn address(self, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(a) => self.key_part(&a.octets()),
            IpAddr::V6(a) => self.key_part(&a.octets()),
        }
    }

    pub fn transport(self, transport: Transport) -> Self {
        self.key_part(&[transport.number()])
    }

    pub fn port(self, port: u16) -> Self {
        self.key_part(&port.to_be_bytes())
    }

    pub fn leads_to(mut self, address: Ipv4Addr, port: u16) -> Self {
        self.data.extend(address.octets());
        self.data.extend(port.to_be_bytes());
        self.data.extend([0, 0]);
        self
    }
}

impl Set {
    /// The key's bytes.
    pub(super) fn key_length(parts: &[KeyPart]) -> u32 {
        parts.iter().map(|part| if *part == KeyPart::Ipv6 { 16 } else { 4 }).sum()
    }
}

impl From<Ipv4Addr> for Element {
    fn from(address: Ipv4Addr) -> Self {
        Self::default().address(address.into())
    }
}
