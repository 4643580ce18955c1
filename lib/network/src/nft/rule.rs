//! Rules, put together: each method adds one thing that a packet is asked for.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::expressions::expressions;
use super::model::{Action, Field, Match, Rule, Test};
use crate::names::DeviceName;
use crate::spec::{Mac, Transport};

impl Rule {
    pub fn new(why: &'static str, action: Action) -> Self {
        Self { why, matches: Vec::new(), action }
    }

    /// The comment that goes with the rule: why it is there, and a digest of what it does.
    pub(super) fn label(&self) -> String {
        let digest = hex::encode(Sha256::digest(expressions(self)));
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

    /// Of one connection more than so many, counted by this rule.
    pub fn connections_over(mut self, count: u32) -> Self {
        self.matches.push(Match::ConnectionsOver(count));
        self
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
