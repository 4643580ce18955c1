//! What a VM may reach: a policy of networks, ports and names.

mod name;
mod text;

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

pub use name::{DomainName, NamePattern, PatternError};
pub use text::{AllowError, Cidr};

use crate::spec::Transport;

/// Where a VM may open connections to. Answers to what is open always come back; what [`always_refused`] lists never
/// opens; `refuse` is asked before `allow`, and `otherwise` decides about the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    pub otherwise: Otherwise,
    #[serde(default)]
    pub refuse: Vec<IpNet>,
    #[serde(default)]
    pub allow: Vec<Allow>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Otherwise {
    Allow,
    Refuse,
}

/// One thing that a VM may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Allow {
    Network { to: IpNet, ports: Ports },
    Name { name: NamePattern, ports: Ports, scope: Scope },
}

/// Which of a name's addresses open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Those of the public internet: whoever owns a name cannot point it into the network that the host is in.
    Public,
    /// Private ones too.
    Anywhere,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ports {
    /// Every port and every protocol, ICMP included.
    Any,
    Only(BTreeSet<PortRange>),
}

/// Ports of one protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortRange {
    pub transport: Transport,
    pub first: u16,
    pub last: u16,
}

/// A policy that would cost the host too much to keep.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    #[error("it has {count} entries; at most {most} are kept: join networks, or allow *. names")]
    TooManyEntries { count: usize, most: usize },
    #[error(
        "it opens {count} ports for the name {name}; at most {most} are kept one by one: allow every port of it"
    )]
    TooManyPorts { name: NamePattern, count: usize, most: usize },
    #[error("the port range {range} is empty or begins with port 0")]
    NoPorts { range: PortRange },
}

impl Egress {
    /// Rules are run for the first packet of every connection: no more than this.
    const MOST_ENTRIES: usize = 512;
    /// Each address of a name takes one element for each of its ports.
    const MOST_PORTS_OF_A_NAME: usize = 32;

    /// Refuses what is too large to keep.
    pub fn check(&self) -> Result<(), EgressError> {
        let ranges = |ports: &Ports| match ports {
            Ports::Any => Vec::new(),
            Ports::Only(ranges) => ranges.iter().copied().collect(),
        };
        let mut entries = self.refuse.len();
        for allow in &self.allow {
            let (Allow::Network { ports, .. } | Allow::Name { ports, .. }) = allow;
            let ranges = ranges(ports);
            entries += ranges.len().max(1);
            if let Some(range) = ranges.iter().find(|range| range.first == 0 || range.first > range.last) {
                return Err(EgressError::NoPorts { range: *range });
            }
            let count = ranges.iter().map(|range| usize::from(range.last - range.first) + 1).sum();
            match allow {
                Allow::Name { name, .. } if count > Self::MOST_PORTS_OF_A_NAME => {
                    let most = Self::MOST_PORTS_OF_A_NAME;
                    return Err(EgressError::TooManyPorts { name: name.clone(), count, most });
                }
                Allow::Name { .. } | Allow::Network { .. } => {}
            }
        }
        if entries > Self::MOST_ENTRIES {
            return Err(EgressError::TooManyEntries { count: entries, most: Self::MOST_ENTRIES });
        }
        Ok(())
    }

    /// Everything but what no VM may reach.
    pub fn open() -> Self {
        Self { otherwise: Otherwise::Allow, refuse: Vec::new(), allow: Vec::new() }
    }

    /// Nothing but what is listed.
    pub fn only(allow: Vec<Allow>) -> Self {
        Self { otherwise: Otherwise::Refuse, refuse: Vec::new(), allow }
    }

    /// Whether a VM may ask for this name at all.
    pub fn may_resolve(&self, name: &DomainName) -> bool {
        match self.otherwise {
            Otherwise::Allow => true,
            Otherwise::Refuse => !self.names(name).is_empty(),
        }
    }

    /// What opens when `name` turns out to be `address`; nothing, if the address may not be opened by a name.
    pub fn opened_by(&self, name: &DomainName, address: IpAddr) -> Vec<&Ports> {
        if never_by_name(address) || self.refuse.iter().any(|net| net.contains(&address)) {
            return Vec::new();
        }
        let public = is_public(address);
        self.names(name)
            .into_iter()
            .filter(|(_, scope)| match scope {
                Scope::Public => public,
                Scope::Anywhere => true,
            })
            .map(|(ports, _)| ports)
            .collect()
    }

    fn names<'a>(&'a self, name: &DomainName) -> Vec<(&'a Ports, Scope)> {
        let of_name = |allow: &'a Allow| match allow {
            Allow::Name { name: pattern, ports, scope } if pattern.matches(name) => Some((ports, *scope)),
            Allow::Name { .. } | Allow::Network { .. } => None,
        };
        self.allow.iter().filter_map(of_name).collect()
    }
}

impl PortRange {
    pub fn one(transport: Transport, port: u16) -> Self {
        Self { transport, first: port, last: port }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.transport, self.first)?;
        if self.last == self.first { Ok(()) } else { write!(f, "-{}", self.last) }
    }
}

/// Where clouds hand out credentials, and the link-local networks around them: no policy opens these.
pub fn always_refused() -> [IpNet; 7] {
    let v4 = |a, b, c, d, length| IpNet::V4(Ipv4Net::new_assert([a, b, c, d].into(), length));
    let v6 = |segments: [u16; 8], length| IpNet::V6(Ipv6Net::new_assert(segments.into(), length));
    [
        // Link-local: 169.254.169.254 and its neighbours on every large cloud.
        v4(169, 254, 0, 0, 16),
        v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
        // Amazon over IPv6: metadata, time, names.
        v6([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0], 32),
        // Google over IPv6.
        v6([0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254], 128),
        // Azure's host agent, Alibaba, Oracle.
        v4(168, 63, 129, 16, 32),
        v4(100, 100, 100, 200, 32),
        v4(192, 0, 0, 192, 32),
    ]
}

/// Addresses that no answer to a question for a name may open, whatever the policy says of the name.
fn never_by_name(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(a) => {
            a.is_loopback() || a.is_multicast() || a.is_broadcast() || a.octets().first() == Some(&0)
        }
        IpAddr::V6(a) => {
            a.is_loopback() || a.is_multicast() || a.is_unspecified() || a.to_ipv4_mapped().is_some()
        }
    };
    special || always_refused().iter().any(|net| net.contains(&address))
}

/// IANA's special-purpose registries, as far as they are not globally reachable.
fn is_public(address: IpAddr) -> bool {
    let not_public: &[IpNet] = &match address {
        IpAddr::V4(_) => [
            "10.0.0.0/8",
            "100.64.0.0/10",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "240.0.0.0/4",
        ],
        IpAddr::V6(_) => [
            "64:ff9b:1::/48",
            "100::/64",
            "2001::/23",
            "2001:db8::/32",
            "2002::/16",
            "3fff::/20",
            "5f00::/16",
            "fc00::/7",
            "fec0::/10",
            "64:ff9b::/96",
        ],
    }
    .map(|net| net.parse().expect("a constant network"));
    !never_by_name(address) && !not_public.iter().any(|net| net.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DomainName {
        text.parse().unwrap()
    }

    fn by_name(pattern: &str, scope: Scope) -> Egress {
        Egress::only(vec![Allow::Name { name: pattern.parse().unwrap(), ports: Ports::Any, scope }])
    }

    #[test]
    fn a_name_opens_its_public_addresses_and_no_private_one() {
        let egress = by_name("example.com", Scope::Public);
        let opens = |a: &str| !egress.opened_by(&name("example.com"), a.parse().unwrap()).is_empty();
        for public in ["93.184.216.34", "1.1.1.1", "2606:4700::1"] {
            assert!(opens(public), "{public}");
        }
        for private in
            ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "64:ff9b::a00:1", "240.0.0.1"]
        {
            assert!(!opens(private), "{private}");
        }
    }

    #[test]
    fn no_scope_lets_a_name_open_metadata_or_the_hosts_own_loopback() {
        let egress = by_name("example.com", Scope::Anywhere);
        let opens = |a: &str| !egress.opened_by(&name("example.com"), a.parse().unwrap()).is_empty();
        assert!(opens("10.0.0.1"));
        for never in [
            "169.254.169.254",
            "169.254.0.1",
            "127.0.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "fe80::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "::ffff:169.254.169.254",
            "::ffff:8.8.8.8",
            "168.63.129.16",
        ] {
            assert!(!opens(never), "{never}");
        }
    }

    #[test]
    fn what_is_refused_stays_refused_when_a_name_leads_there() {
        let mut egress = by_name("example.com", Scope::Anywhere);
        egress.refuse = vec!["10.1.0.0/16".parse().unwrap()];
        assert!(egress.opened_by(&name("example.com"), "10.1.2.3".parse().unwrap()).is_empty());
        assert_eq!(egress.opened_by(&name("example.com"), "10.2.2.3".parse().unwrap()).len(), 1);
    }

    #[test]
    fn a_policy_that_would_cost_too_much_is_refused() {
        let ranges = |first, last| Ports::Only([PortRange { transport: Transport::Tcp, first, last }].into());
        let name = |ports| Allow::Name { name: "a.example".parse().unwrap(), ports, scope: Scope::Public };
        let network = |ports| Allow::Network { to: "10.0.0.0/8".parse().unwrap(), ports };
        assert!(Egress::only(vec![name(ranges(1000, 1031))]).check().is_ok());
        assert!(matches!(
            Egress::only(vec![name(ranges(1000, 1032))]).check(),
            Err(EgressError::TooManyPorts { .. })
        ));
        assert!(Egress::only(vec![network(ranges(1, 65535))]).check().is_ok());
        for (first, last) in [(0, 9), (9, 8)] {
            let refused = Egress::only(vec![network(ranges(first, last))]).check();
            assert!(matches!(refused, Err(EgressError::NoPorts { .. })));
        }
        let many = Egress::only(vec![network(Ports::Any); 513]).check();
        assert!(matches!(many, Err(EgressError::TooManyEntries { .. })));
    }

    #[test]
    fn an_open_policy_resolves_all_names_and_a_closed_one_its_own() {
        assert!(Egress::open().may_resolve(&name("anything.example")));
        let closed = by_name("*.example.com", Scope::Public);
        assert!(closed.may_resolve(&name("a.example.com")));
        assert!(!closed.may_resolve(&name("example.com")));
        assert!(!closed.may_resolve(&name("example.com.evil.net")));
    }
}
