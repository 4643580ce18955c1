//! Rules as `nft` would write them, for tests and for people.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::model::{Action, Field, Match, Rule, Test};
use crate::spec::Mac;

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for one in &self.matches {
            match one {
                Match::Field(field, test) => write!(f, "{} {} ", name(*field), value(*field, test))?,
                Match::InSet(fields, set) => write!(f, "{} @{set} ", names(fields))?,
                Match::ConnectionsOver(count) => write!(f, "ct count over {count} ")?,
            }
        }
        match &self.action {
            Action::Accept => f.write_str("accept"),
            Action::Drop => f.write_str("drop"),
            Action::Reject => f.write_str("reject"),
            Action::Masquerade => f.write_str("masquerade"),
            Action::SendTo(address, port) => {
                write!(f, "dnat to {}", std::net::SocketAddr::new(*address, *port))
            }
            Action::SendByMap(fields, map, _) => write!(f, "dnat to {} map @{map}", names(fields)),
        }
    }
}

fn names(fields: &[Field]) -> String {
    fields.iter().map(|field| name(*field)).collect::<Vec<_>>().join(" . ")
}

fn name(field: Field) -> &'static str {
    match field {
        Field::InDevice => "iifname",
        Field::OutDevice => "oifname",
        Field::IpVersion => "meta nfproto",
        Field::EtherType => "ether type",
        Field::EtherSource => "ether saddr",
        Field::ArpSenderMac => "arp saddr ether",
        Field::ArpSenderAddress => "arp saddr ip",
        Field::Source4 => "ip saddr",
        Field::Source6 => "ip6 saddr",
        Field::Destination4 => "ip daddr",
        Field::Destination6 => "ip6 daddr",
        Field::Transport => "meta l4proto",
        Field::DestinationPort => "th dport",
        Field::IcmpType => "icmp type",
        Field::ConnectionState => "ct state",
        Field::ConnectionStatus => "ct status",
        Field::DestinationKind => "fib daddr type",
    }
}

fn value(field: Field, test: &Test) -> String {
    match test {
        Test::Is(bytes) => bytes_of(field, bytes),
        Test::IsNot(bytes) => format!("!= {}", bytes_of(field, bytes)),
        Test::Within(bytes, prefix) => format!("{}/{prefix}", bytes_of(field, bytes)),
        Test::NotWithin(bytes, prefix) => format!("!= {}/{prefix}", bytes_of(field, bytes)),
        Test::Between(first, last) => format!("{}-{}", bytes_of(field, first), bytes_of(field, last)),
        Test::AnyOf(6) if field == Field::ConnectionState => "established,related".to_owned(),
        Test::AnyOf(1) if field == Field::ConnectionState => "invalid".to_owned(),
        Test::AnyOf(32) if field == Field::ConnectionStatus => "dnat".to_owned(),
        Test::AnyOf(bits) => format!("{bits:#x}"),
    }
}

fn bytes_of(field: Field, bytes: &[u8]) -> String {
    match (field, bytes) {
        (Field::InDevice | Field::OutDevice, name) if name.len() < 16 => {
            format!("{}*", String::from_utf8_lossy(name))
        }
        (Field::InDevice | Field::OutDevice, name) => {
            String::from_utf8_lossy(name).trim_end_matches('\0').to_owned()
        }
        (Field::IpVersion, [2]) => "ipv4".to_owned(),
        (Field::IpVersion, [10]) => "ipv6".to_owned(),
        (Field::Transport, [6]) => "tcp".to_owned(),
        (Field::Transport, [17]) => "udp".to_owned(),
        (Field::Transport, [1]) => "icmp".to_owned(),
        (Field::Transport, [58]) => "icmpv6".to_owned(),
        (Field::DestinationKind, _) => "local".to_owned(),
        (_, [a, b, c, d]) => Ipv4Addr::new(*a, *b, *c, *d).to_string(),
        (Field::DestinationPort, [a, b]) => u16::from_be_bytes([*a, *b]).to_string(),
        (Field::EtherType, [a, b]) => format!("{:#06x}", u16::from_be_bytes([*a, *b])),
        (_, [one]) => one.to_string(),
        (_, other) => match (<[u8; 6]>::try_from(other), <[u8; 16]>::try_from(other)) {
            (Ok(mac), _) => Mac(mac).to_string(),
            (_, Ok(address)) => Ipv6Addr::from(address).to_string(),
            _ => hex::encode(other),
        },
    }
}
