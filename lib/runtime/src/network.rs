//! A VM's network: none, one behind passt ([`passt`]), or a tap with filters of the kernel ([`bridge`]).

use std::fs;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use imp_network::spec::VmNetwork;
use imp_protocol::guest::NetworkInterface;
use tokio_util::task::AbortOnDropHandle;

use crate::id::VmId;
use crate::process::Process;
use crate::spec::NetworkMode;
use crate::status::NetworkFacts;

mod book;
pub(crate) mod bridge;
pub(crate) mod check;
mod choice;
pub(crate) mod passt;

pub use choice::Refused;
pub(crate) use choice::{asked, choose};

/// A network that is there, for the VMM to attach to.
#[derive(Debug)]
pub(crate) enum Network {
    Passt(passt::Passt),
    Bridge {
        namespace: OwnedFd,
        /// With the ports as they are published.
        network: Box<VmNetwork>,
        name_server: AbortOnDropHandle<()>,
    },
}

impl Network {
    /// The process that carries the frames, if one does.
    pub(crate) fn process(&self) -> Option<&Process> {
        match self {
            Self::Passt(passt) => Some(&passt.process),
            Self::Bridge { .. } => None,
        }
    }
}

/// What is shown of the network of a VM, and told to its guest. `bridge`: of a VM that has one, with its MTU.
pub(crate) fn facts(mode: NetworkMode, mac: &str, bridge: Option<(&VmNetwork, u32)>) -> NetworkFacts {
    let nothing = NetworkFacts {
        mode,
        mac: None,
        addresses: Vec::new(),
        gateways: Vec::new(),
        nameservers: Vec::new(),
        mtu: None,
        uplink: Vec::new(),
        egress: None,
    };
    match (mode, bridge) {
        (NetworkMode::None, _) | (NetworkMode::Bridge, None) => nothing,
        (NetworkMode::User, _) => NetworkFacts {
            mac: Some(mac.to_owned()),
            addresses: vec![format!("{}/{}", passt::GUEST, passt::PREFIX)],
            gateways: vec![IpAddr::V4(passt::GATEWAY)],
            nameservers: vec![IpAddr::V4(passt::NAMESERVER)],
            mtu: Some(passt::MTU),
            ..nothing
        },
        (NetworkMode::Bridge, Some((network, mtu))) => {
            let guest = &network.guest;
            let (gateway, gateway6) = (guest.gateway(), guest.gateway6());
            let mut addresses = vec![format!("{}/{}", guest.address(), gateway.prefix_len())];
            let ipv6 = guest.address6().zip(gateway6);
            addresses.extend(ipv6.map(|(address, gateway)| format!("{address}/{}", gateway.prefix_len())));
            let mut gateways = vec![IpAddr::V4(gateway.addr())];
            gateways.extend(gateway6.map(|gateway| IpAddr::V6(gateway.addr())));
            let mut uplink = vec![IpAddr::V4(network.link.ipv4.vm)];
            uplink.extend(ipv6.and(network.link.ipv6).map(|ends| IpAddr::V6(ends.vm)));
            NetworkFacts {
                mac: Some(guest.mac().to_string()),
                addresses,
                // Its gateway answers questions for names, too.
                nameservers: vec![IpAddr::V4(gateway.addr())],
                gateways,
                mtu: Some(mtu),
                uplink,
                egress: Some(network.egress.clone()),
                ..nothing
            }
        }
    }
}

/// A locally administered address out of the id, which the VM keeps.
pub(crate) fn mac(id: &VmId) -> String {
    let digits = id.as_str().get(..6).unwrap_or("000000");
    let octet = |at: usize| digits.get(at..at + 2).unwrap_or("00");
    format!("52:54:00:{}:{}:{}", octet(0), octet(2), octet(4))
}

/// What the guest is told of its network.
pub(crate) fn interface(facts: &NetworkFacts) -> Option<NetworkInterface> {
    let mac = facts.mac.clone()?;
    Some(NetworkInterface {
        mac,
        addresses: facts.addresses.clone(),
        gateways: facts.gateways.iter().map(IpAddr::to_string).collect(),
        nameservers: facts.nameservers.iter().map(IpAddr::to_string).collect(),
        search_domains: search_domains(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default()),
        mtu: facts.mtu.unwrap_or_default(),
    })
}

/// The host's search list: the last `search` line of resolv.conf counts.
fn search_domains(resolv_conf: &str) -> Vec<String> {
    let last = resolv_conf.lines().filter_map(|line| line.trim().strip_prefix("search")).next_back();
    last.map(|list| list.split_whitespace().take(6).map(str::to_owned).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_without_a_network_has_no_address_and_one_with_has_all_it_needs() {
        let id = VmId::from_random([0xab; 8]);
        assert!(interface(&facts(NetworkMode::None, &mac(&id), None)).is_none());
        let user = interface(&facts(NetworkMode::User, &mac(&id), None)).unwrap();
        assert_eq!((user.mac.as_str(), user.mtu), ("52:54:00:ab:ab:ab", 65_520));
        assert_eq!((user.addresses, user.gateways), (vec!["10.0.2.15/24".into()], vec!["10.0.2.2".into()]));
    }

    #[test]
    fn the_last_search_list_counts() {
        assert_eq!(search_domains("search a\nnameserver 1.1.1.1\nsearch b c\n"), ["b", "c"]);
        assert!(search_domains("nameserver 1.1.1.1").is_empty());
    }
}
