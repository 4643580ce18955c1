//! Leases of uplink addresses from a pool: pure bookkeeping that its owner writes to a file and reads back.
//!
//! A link is two neighbouring addresses (a /31, and a /127 where the pool has IPv6): the even one is the host's, the
//! odd one the VM's. Freed links are leased again as late as possible, so that a stale connection of a dead VM does not
//! meet its successor.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::names::{DeviceName, VmName};

/// Where link addresses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PoolText", into = "PoolText")]
pub struct Pool {
    ipv4: Ipv4Net,
    ipv6: Option<Ipv6Net>,
}

/// The addresses of one uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    pub ipv4: Ends<Ipv4Addr>,
    pub ipv6: Option<Ends<Ipv6Addr>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends<Address> {
    pub host: Address,
    pub vm: Address,
}

/// Which VM has which link of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Recorded", into = "Recorded")]
pub struct Addresses {
    pool: Pool,
    leases: BTreeMap<VmName, u32>,
    /// Where the search for a free link goes on.
    next: u32,
}

/// A route of the host that is not ours.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostRoute {
    pub to: IpNet,
    pub device: DeviceName,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("{net} is too small for a pool of uplinks: it needs a prefix length of at most {longest}")]
    PoolTooSmall { net: IpNet, longest: u8 },
    #[error("{net} cannot be a pool of uplinks: its addresses are not for hosts")]
    PoolNotForHosts { net: IpNet },
    #[error("all {links} links of the address pool {pool} are taken: end some VMs, or set a larger pool")]
    Exhausted { pool: Ipv4Net, links: u32 },
    #[error(
        "the address pool {pool} lies in {route}, which this host reaches through {device}: set a pool that is free here"
    )]
    Conflict { pool: IpNet, route: IpNet, device: DeviceName },
    #[error(
        "every pool that was tried is in use on this host, the last one ({pool}) by {route} on {device}: set one that is free"
    )]
    NoFreePool { pool: IpNet, route: IpNet, device: DeviceName },
    #[error(
        "the recorded addresses are damaged: {vm} has link {link} of {links} or shares it: remove the record once no VM runs"
    )]
    Damaged { vm: VmName, link: u32, links: u32 },
}

impl Pool {
    const LONGEST_V4: u8 = 30;
    const LONGEST_V6: u8 = 112;

    /// A pool; with `ipv6` (usually a /64 of a unique local prefix) its links have both.
    pub fn new(ipv4: Ipv4Net, ipv6: Option<Ipv6Net>) -> Result<Self, AddressError> {
        let ipv4 = ipv4.trunc();
        if ipv4.prefix_len() > Self::LONGEST_V4 {
            return Err(AddressError::PoolTooSmall { net: ipv4.into(), longest: Self::LONGEST_V4 });
        }
        let first = ipv4.network();
        if ipv4.prefix_len() < 8
            || first.is_multicast()
            || first.is_loopback()
            || first.is_link_local()
            || first.is_unspecified()
        {
            return Err(AddressError::PoolNotForHosts { net: ipv4.into() });
        }
        let ipv6 = ipv6.map(|net| net.trunc());
        if let Some(net) = ipv6 {
            if net.prefix_len() > Self::LONGEST_V6 {
                return Err(AddressError::PoolTooSmall { net: net.into(), longest: Self::LONGEST_V6 });
            }
            let first = net.network();
            if net.prefix_len() < 16
                || first.is_multicast()
                || first.is_unicast_link_local()
                || first.octets().starts_with(&[0; 4])
            {
                return Err(AddressError::PoolNotForHosts { net: net.into() });
            }
        }
        Ok(Self { ipv4, ipv6 })
    }

    pub fn ipv4(&self) -> Ipv4Net {
        self.ipv4
    }

    pub fn ipv6(&self) -> Option<Ipv6Net> {
        self.ipv6
    }

    /// The first of `candidates` that no route of the host overlaps.
    pub fn first_free(candidates: &[Self], routes: &[HostRoute]) -> Result<Self, AddressError> {
        let mut last = None;
        for pool in candidates {
            match pool.conflict(routes) {
                None => return Ok(*pool),
                Some(found) => last = Some(found),
            }
        }
        let (pool, route) = last.unwrap_or_else(|| {
            let nothing = HostRoute { to: IpNet::V4(Ipv4Net::default()), device: DeviceName::uplink() };
            (nothing.to, nothing)
        });
        Err(AddressError::NoFreePool { pool, route: route.to, device: route.device })
    }

    /// Refuses a pool that hides a network which the host reaches: one of its routes other than the default covers it.
    pub fn check(&self, routes: &[HostRoute]) -> Result<(), AddressError> {
        match self.conflict(&routes.iter().filter(|r| !self.contains(&r.to)).cloned().collect::<Vec<_>>()) {
            Some((pool, route)) => {
                Err(AddressError::Conflict { pool, route: route.to, device: route.device })
            }
            None => Ok(()),
        }
    }

    fn conflict(&self, routes: &[HostRoute]) -> Option<(IpNet, HostRoute)> {
        let ours = [Some(IpNet::V4(self.ipv4)), self.ipv6.map(IpNet::V6)];
        let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
        ours.into_iter().flatten().find_map(|pool| {
            let route = routes.iter().find(|r| r.to.prefix_len() > 0 && overlap(&pool, &r.to))?;
            Some((pool, route.clone()))
        })
    }

    fn contains(&self, net: &IpNet) -> bool {
        match net {
            IpNet::V4(net) => self.ipv4.contains(net),
            IpNet::V6(net) => self.ipv6.is_some_and(|pool| pool.contains(net)),
        }
    }

    fn links(&self) -> u32 {
        1 << (31 - u32::from(self.ipv4.prefix_len()))
    }

    fn link(&self, index: u32) -> Link {
        let even = u32::from(self.ipv4.network()) + index * 2;
        Link {
            ipv4: Ends { host: even.into(), vm: (even + 1).into() },
            ipv6: self.ipv6.map(|net| {
                let even = u128::from(net.network()) + u128::from(index) * 2;
                Ends { host: even.into(), vm: (even + 1).into() }
            }),
        }
    }
}

impl Link {
    /// Whether `net` covers an address of this link.
    fn meets(&self, net: &IpNet) -> bool {
        let mut addresses = vec![IpAddr::V4(self.ipv4.host), self.ipv4.vm.into()];
        addresses.extend(self.ipv6.iter().flat_map(|ends| [IpAddr::V6(ends.host), ends.vm.into()]));
        addresses.iter().any(|address| net.contains(address))
    }
}

impl Addresses {
    pub fn new(pool: Pool) -> Self {
        Self { pool, leases: BTreeMap::new(), next: 0 }
    }

    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// The VM's link: the one it has, else the next free one that no route of the host lies in. The caller writes the
    /// changed bookkeeping down before it uses the link.
    pub fn lease(&mut self, vm: &VmName, routes: &[HostRoute]) -> Result<Link, AddressError> {
        if let Some(link) = self.of(vm) {
            return Ok(link);
        }
        self.pool.check(routes)?;
        let links = self.pool.links();
        let taken: BTreeSet<u32> = self.leases.values().copied().collect();
        // A pool may have millions of links and few leases: the search passes over taken ones only.
        for step in 0..links {
            let index = (self.next + step) % links;
            let link = self.pool.link(index);
            let foreign = routes.iter().any(|r| self.pool.contains(&r.to) && link.meets(&r.to));
            if !taken.contains(&index) && !foreign {
                self.leases.insert(vm.clone(), index);
                self.next = (index + 1) % links;
                return Ok(link);
            }
        }
        Err(AddressError::Exhausted { pool: self.pool.ipv4, links })
    }

    /// Gives the VM's link back; having none is fine.
    pub fn release(&mut self, vm: &VmName) {
        self.leases.remove(vm);
    }

    pub fn of(&self, vm: &VmName) -> Option<Link> {
        self.leases.get(vm).map(|index| self.pool.link(*index))
    }

    /// Who has a link, so that leases of VMs that are gone can be released.
    pub fn holders(&self) -> impl Iterator<Item = &VmName> {
        self.leases.keys()
    }
}

/// What the file says, before it is believed.
#[derive(Serialize, Deserialize)]
struct Recorded {
    pool: Pool,
    leases: BTreeMap<VmName, u32>,
    next: u32,
}

impl TryFrom<Recorded> for Addresses {
    type Error = AddressError;

    fn try_from(recorded: Recorded) -> Result<Self, AddressError> {
        let links = recorded.pool.links();
        let mut seen = BTreeSet::new();
        for (vm, link) in &recorded.leases {
            if *link >= links || !seen.insert(*link) {
                return Err(AddressError::Damaged { vm: vm.clone(), link: *link, links });
            }
        }
        Ok(Self { pool: recorded.pool, leases: recorded.leases, next: recorded.next % links })
    }
}

impl From<Addresses> for Recorded {
    fn from(addresses: Addresses) -> Self {
        Self { pool: addresses.pool, leases: addresses.leases, next: addresses.next }
    }
}

#[derive(Serialize, Deserialize)]
struct PoolText {
    ipv4: Ipv4Net,
    ipv6: Option<Ipv6Net>,
}

impl TryFrom<PoolText> for Pool {
    type Error = AddressError;

    fn try_from(text: PoolText) -> Result<Self, AddressError> {
        Self::new(text.ipv4, text.ipv6)
    }
}

impl From<Pool> for PoolText {
    fn from(pool: Pool) -> Self {
        Self { ipv4: pool.ipv4, ipv6: pool.ipv6 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vm(n: usize) -> VmName {
        format!("vm{n}").parse().unwrap()
    }

    fn pool(text: &str) -> Pool {
        Pool::new(text.parse().unwrap(), Some("fd00:1::/64".parse().unwrap())).unwrap()
    }

    fn route(to: &str) -> HostRoute {
        HostRoute { to: to.parse().unwrap(), device: "eth0".parse().unwrap() }
    }

    #[test]
    fn links_are_neighbouring_addresses_of_both_families() {
        let mut addresses = Addresses::new(pool("10.9.0.0/16"));
        addresses.lease(&vm(0), &[]).unwrap();
        let link = addresses.lease(&vm(1), &[]).unwrap();
        assert_eq!((link.ipv4.host, link.ipv4.vm), ([10, 9, 0, 2].into(), [10, 9, 0, 3].into()));
        let ends = link.ipv6.unwrap();
        assert_eq!((ends.host, ends.vm), ("fd00:1::2".parse().unwrap(), "fd00:1::3".parse().unwrap()));
    }

    #[test]
    fn a_vm_keeps_its_link_and_a_freed_one_is_used_last() {
        let mut addresses = Addresses::new(pool("10.9.0.0/29"));
        let first = addresses.lease(&vm(0), &[]).unwrap();
        assert_eq!(addresses.lease(&vm(0), &[]).unwrap(), first);
        addresses.release(&vm(0));
        addresses.release(&vm(0));
        for n in 1..4 {
            assert_ne!(addresses.lease(&vm(n), &[]).unwrap(), first);
        }
        assert_eq!(addresses.lease(&vm(4), &[]).unwrap(), first);
        assert!(matches!(addresses.lease(&vm(5), &[]), Err(AddressError::Exhausted { links: 4, .. })));
    }

    #[test]
    fn a_route_over_the_pool_is_a_conflict_and_one_inside_it_is_passed_over() {
        let mut addresses = Addresses::new(pool("10.9.0.0/16"));
        for covering in ["10.0.0.0/8", "fd00::/8"] {
            let refused = addresses.lease(&vm(0), &[route(covering)]);
            assert!(matches!(refused, Err(AddressError::Conflict { .. })), "{covering}");
        }
        let link = addresses
            .lease(&vm(0), &[route("0.0.0.0/0"), route("10.9.0.0/30"), route("fd00:1::4/128")])
            .unwrap();
        assert_eq!(link.ipv4.host, Ipv4Addr::new(10, 9, 0, 6));
    }

    #[test]
    fn the_first_pool_without_an_overlap_is_chosen() {
        let candidates = [pool("10.9.0.0/16"), pool("172.29.0.0/16")];
        assert_eq!(Pool::first_free(&candidates, &[route("10.9.3.0/24")]).unwrap(), candidates[1]);
        let refused = Pool::first_free(&candidates, &[route("10.9.3.0/24"), route("172.16.0.0/12")]);
        assert!(matches!(refused, Err(AddressError::NoFreePool { .. })));
    }

    #[test]
    fn what_can_be_no_pool_is_refused() {
        for bad in ["10.0.0.0/31", "127.0.0.0/16", "169.254.0.0/16", "224.0.0.0/8", "0.0.0.0/0"] {
            assert!(Pool::new(bad.parse().unwrap(), None).is_err(), "{bad}");
        }
        for bad in ["fd00::/113", "fe80::/64", "ff02::/64", "::/64"] {
            assert!(Pool::new("10.0.0.0/16".parse().unwrap(), Some(bad.parse().unwrap())).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_damaged_record_is_refused() {
        let mut addresses = Addresses::new(pool("10.9.0.0/29"));
        addresses.lease(&vm(0), &[]).unwrap();
        addresses.lease(&vm(1), &[]).unwrap();
        let text = serde_json::to_string(&addresses).unwrap();
        assert_eq!(serde_json::from_str::<Addresses>(&text).unwrap(), addresses);
        for (from, to) in [("\"vm1\":1", "\"vm1\":0"), ("\"vm1\":1", "\"vm1\":4"), ("\"vm1\"", "\"../vm\"")] {
            assert!(serde_json::from_str::<Addresses>(&text.replace(from, to)).is_err(), "{from} {to}");
        }
    }

    proptest! {
        /// Leases, releases and restarts in any order.
        #[test]
        fn no_two_vms_ever_share_an_address(steps in prop::collection::vec((0usize..12, 0u8..3), 0..80)) {
            let mut addresses = Addresses::new(pool("10.9.0.0/28"));
            for (n, what) in steps {
                match what {
                    0 => addresses.release(&vm(n)),
                    1 => { let _ = addresses.lease(&vm(n), &[]); }
                    _ => {
                        let text = serde_json::to_string(&addresses).unwrap();
                        addresses = serde_json::from_str(&text).unwrap();
                    }
                }
                let held: Vec<Link> = addresses.holders().map(|vm| addresses.of(vm).unwrap()).collect();
                let distinct: BTreeSet<Ipv4Addr> = held.iter().flat_map(|l| [l.ipv4.host, l.ipv4.vm]).collect();
                prop_assert_eq!(distinct.len(), held.len() * 2);
                prop_assert!(distinct.iter().all(|a| addresses.pool().ipv4().contains(a)));
            }
        }
    }
}
