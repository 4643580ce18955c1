//! Tables, chains, rules and sets, as far as this project uses them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::names::DeviceName;
use crate::spec::Transport;

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
    /// So many of the connections that came to this rule are there still.
    ConnectionsOver(u32),
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
    /// To the address and port that the map has for the fields; nothing happens if it has none.
    SendByMap(Vec<Field>, &'static str, IpVersion),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpVersion {
    V4,
    V6,
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

    pub fn leads_to(mut self, address: IpAddr, port: u16) -> Self {
        match address {
            IpAddr::V4(a) => self.data.extend(a.octets()),
            IpAddr::V6(a) => self.data.extend(a.octets()),
        }
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
