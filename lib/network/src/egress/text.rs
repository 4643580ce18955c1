//! What a VM may reach, as people write it: `10.0.0.0/8`, `192.0.2.7:443`, `[fd00::/8]:53/udp`, `*.example.com:80-89`.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

use super::{Allow, NamePattern, PatternError, PortRange, Ports, Scope};
use crate::spec::Transport;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllowError {
    #[error("{text:?} has no ports after its colon: write NUMBER or FIRST-LAST, and /udp behind it for UDP")]
    Ports { text: String },
    #[error("{text:?} is not a network: write an address, or an address and a prefix length")]
    Network { text: String },
    #[error(transparent)]
    Name(#[from] PatternError),
}

/// Names open their public addresses only: whoever owns a name cannot point it into the network that the host is in.
impl FromStr for Allow {
    type Err = AllowError;

    fn from_str(text: &str) -> Result<Self, AllowError> {
        let (target, ports) = split(text)?;
        let ports = ports.map_or(Ok(Ports::Any), |ports| parse_ports(text, ports))?;
        let is_network = target.contains('/') || target.contains(':') || target.parse::<IpAddr>().is_ok();
        if is_network {
            return Ok(Self::Network { to: target.parse::<Cidr>()?.network(), ports });
        }
        Ok(Self::Name { name: target.parse::<NamePattern>()?, ports, scope: Scope::Public })
    }
}

/// A network as people write it: an address and a prefix length, or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr(IpNet);

impl Cidr {
    pub fn network(self) -> IpNet {
        self.0
    }
}

impl FromStr for Cidr {
    type Err = AllowError;

    fn from_str(text: &str) -> Result<Self, AllowError> {
        let whole = text.parse::<IpNet>().ok().map(|net| net.trunc());
        let found = whole.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
        found.map(Self).ok_or_else(|| AllowError::Network { text: text.to_owned() })
    }
}

/// What stands before the ports, and the ports. IPv6 stands in brackets if ports follow.
fn split(text: &str) -> Result<(&str, Option<&str>), AllowError> {
    if let Some(rest) = text.strip_prefix('[') {
        let not_a_network = || AllowError::Network { text: text.to_owned() };
        let (inside, after) = rest.split_once(']').ok_or_else(not_a_network)?;
        return match after.strip_prefix(':') {
            Some(ports) => Ok((inside, Some(ports))),
            None if after.is_empty() => Ok((inside, None)),
            None => Err(not_a_network()),
        };
    }
    match text.split_once(':') {
        // More than one colon: IPv6 without ports.
        Some((_, rest)) if rest.contains(':') => Ok((text, None)),
        Some((target, ports)) => Ok((target, Some(ports))),
        None => Ok((text, None)),
    }
}

fn parse_ports(text: &str, ports: &str) -> Result<Ports, AllowError> {
    let wrong = || AllowError::Ports { text: text.to_owned() };
    let (numbers, transport) = match ports.split_once('/') {
        None => (ports, Transport::Tcp),
        Some((numbers, "tcp")) => (numbers, Transport::Tcp),
        Some((numbers, "udp")) => (numbers, Transport::Udp),
        Some(_) => return Err(wrong()),
    };
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
    let (first, last) = numbers.split_once('-').unwrap_or((numbers, numbers));
    let range = PortRange { transport, first: number(first)?, last: number(last)? };
    if range.first > range.last { Err(wrong()) } else { Ok(Ports::Only([range].into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(transport: Transport, first: u16, last: u16) -> Ports {
        Ports::Only([PortRange { transport, first, last }].into())
    }

    #[test]
    fn networks_addresses_and_names_are_told_apart() {
        let net = |to: &str, ports| Ok(Allow::Network { to: to.parse().unwrap(), ports });
        let name =
            |name: &str, ports| Ok(Allow::Name { name: name.parse().unwrap(), ports, scope: Scope::Public });
        for (text, expected) in [
            ("10.1.2.3/8", net("10.0.0.0/8", Ports::Any)),
            ("192.0.2.7", net("192.0.2.7/32", Ports::Any)),
            ("192.0.2.7:443", net("192.0.2.7/32", ports(Transport::Tcp, 443, 443))),
            ("10.0.0.0/8:53/udp", net("10.0.0.0/8", ports(Transport::Udp, 53, 53))),
            ("fd00::/8", net("fd00::/8", Ports::Any)),
            ("[fd00::1]", net("fd00::1/128", Ports::Any)),
            ("[fd00::/8]:80-89", net("fd00::/8", ports(Transport::Tcp, 80, 89))),
            ("example.com", name("example.com", Ports::Any)),
            ("*.example.com:443", name("*.example.com", ports(Transport::Tcp, 443, 443))),
        ] {
            assert_eq!(text.parse::<Allow>(), expected, "{text}");
        }
    }

    #[test]
    fn what_opens_nothing_that_anybody_meant_is_refused() {
        for bad in ["a:", "a:0", "a:2-1", "a:80/sctp", "a:65536", "10.0.0.1:b"] {
            assert!(matches!(bad.parse::<Allow>(), Err(AllowError::Ports { .. })), "{bad}");
        }
        for bad in ["10.0.0.0/33", "[fd00::1", "[fd00::1]443", "fd00::x", "a/b"] {
            assert!(matches!(bad.parse::<Allow>(), Err(AllowError::Network { .. })), "{bad}");
        }
        for bad in ["", "a b", "*", "a.*"] {
            assert!(matches!(bad.parse::<Allow>(), Err(AllowError::Name(_))), "{bad}");
        }
    }
}
