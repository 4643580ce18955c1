//! The host's side: the uplinks' ends, forwarding, address translation, isolation, published ports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Device, DeviceKind, HOST_END_MAC, HostFacts, Links, Neighbour, VM_END_MAC};
use crate::egress::always_refused;
use crate::names::{SiteName, VmName};
use crate::nft::{
    Action, Chain, Element, Family, Field, Hook, IpVersion, KeyPart, Policy, Rule, Set, Table, TableId,
};
use crate::spec::{Outside, PublishOn, Site, VmNetwork};

const PUBLISHED_AT: &str = "published_at";
const PUBLISHED: &str = "published";
const PUBLISHED6_AT: &str = "published6_at";
const PUBLISHED6: &str = "published6";

/// More than the ports of both protocols.
const MOST_PUBLISHED: u32 = 1 << 17;

pub(super) fn id(site: &SiteName) -> TableId {
    TableId { family: Family::Inet, name: site.table().to_owned() }
}

/// What holds whichever VMs are looked at.
pub(super) fn common_links(vms: &BTreeMap<VmName, VmNetwork>, facts: &HostFacts) -> Links {
    let mut links = Links::default();
    if vms.is_empty() {
        return links;
    }
    // Answers come in where the default routes lead out. Not for all devices: whether this host routes between its
    // other networks is not for us to change.
    for route in facts.routes.iter().filter(|r| r.to.prefix_len() == 0 && matches!(r.to, IpNet::V4(_))) {
        links.settings.insert(format!("net/ipv4/conf/{}/forwarding", route.device), "1".to_owned());
    }
    if vms.values().any(|vm| vm.guest.address6().is_some()) {
        // A host that forwards IPv6 stops listening to router advertisements, and loses its own routes, unless told.
        for device in &facts.advertised {
            links.settings.insert(format!("net/ipv6/conf/{device}/accept_ra"), "2".to_owned());
        }
        // For IPv6 there is only this one switch for all devices.
        links.settings.insert("net/ipv6/conf/all/forwarding".to_owned(), "1".to_owned());
    }
    links
}

pub(super) fn add_uplink(links: &mut Links, site: &Site, vm: &VmNetwork, facts: &HostFacts) {
    let device = site.name.uplink_of(&vm.vm);
    let mut addresses: BTreeSet<IpNet> = [Ipv4Net::new_assert(vm.link.ipv4.host, 31).into()].into();
    links.neighbours.insert(Neighbour {
        address: vm.link.ipv4.vm.into(),
        mac: VM_END_MAC,
        device: device.clone(),
    });
    let ipv6 = vm.link.ipv6.filter(|_| vm.guest.address6().is_some());
    if let Some(ends) = ipv6 {
        addresses.insert(Ipv6Net::new_assert(ends.host, 127).into());
        links.neighbours.insert(Neighbour {
            address: ends.vm.into(),
            mac: VM_END_MAC,
            device: device.clone(),
        });
    }
    let loopback = vm.publish.iter().any(|p| p.on_loopback());
    let mut set = |file: &str, value: &str| {
        links.settings.insert(format!("net/{}", file.replace("DEVICE", device.as_str())), value.to_owned());
    };
    set("ipv4/conf/DEVICE/forwarding", "1");
    set("ipv4/conf/DEVICE/rp_filter", "1");
    // What is sent to a published port of 127.0.0.1 comes back as an answer to 127.0.0.1.
    set("ipv4/conf/DEVICE/route_localnet", if loopback { "1" } else { "0" });
    match ipv6 {
        Some(_) => set("ipv6/conf/DEVICE/accept_ra", "0"),
        None if facts.ipv6 => set("ipv6/conf/DEVICE/disable_ipv6", "1"),
        None => {}
    }
    let alias = Some(site.name.alias_of(&vm.vm));
    let uplink =
        Device { kind: DeviceKind::Pair, mac: HOST_END_MAC, mtu: site.mtu, up: true, alias, addresses };
    links.devices.insert(device, uplink);
}

/// The one table of the host's namespace, for all VMs: rules that do not depend on which there are, and maps of the
/// published ports.
pub(super) fn table(site: &Site, vms: &BTreeMap<VmName, VmNetwork>) -> Table {
    let uplinks = site.name.prefix();
    Table {
        id: id(&site.name),
        sets: sets(site, vms),
        chains: vec![
            chain("early", Hook::Early, early(site, &uplinks)),
            chain("published_in", Hook::NatIn, published(site)),
            chain("published_local", Hook::NatLocal, published(site)),
            chain("input", Hook::Input, input(&uplinks)),
            chain("forward", Hook::Forward, forward(&uplinks)),
            chain("nat_out", Hook::NatOut, nat_out(site, &uplinks)),
        ],
    }
}

fn chain(name: &'static str, hook: Hook, rules: Vec<Rule>) -> Chain {
    // Other people's packets come through these chains as well: what no rule is about goes on.
    Chain { name, hook, policy: Policy::Accept, rules }
}

fn early(site: &Site, uplinks: &str) -> Vec<Rule> {
    let loopback = IpNet::V4(Ipv4Net::new_assert([127, 0, 0, 0].into(), 8));
    let mut rules = vec![
        Rule::new("no VM reaches the host's loopback", Action::Drop).from_any(uplinks).destination(loopback),
    ];
    // The kernel's own check of senders (rp_filter) does this for IPv4, and only for IPv4.
    rules.extend(site.pool.ipv6().map(|pool| {
        Rule::new("VMs speak from leased addresses", Action::Drop)
            .from_any(uplinks)
            .source_outside(pool.into())
    }));
    rules
}

fn published(site: &Site) -> Vec<Rule> {
    let port = [Field::Transport, Field::DestinationPort];
    let at = |address, map, version| {
        let fields = [vec![address], port.to_vec()].concat();
        Rule::new("ports published at one address", Action::SendByMap(fields, map, version))
    };
    let everywhere = |map, version| {
        Rule::new("ports published at every address", Action::SendByMap(port.to_vec(), map, version))
    };
    let mut rules = vec![
        at(Field::Destination4, PUBLISHED_AT, IpVersion::V4).ipv4(),
        everywhere(PUBLISHED, IpVersion::V4).ipv4().to_this_machine(),
    ];
    if site.pool.ipv6().is_some() {
        rules.push(at(Field::Destination6, PUBLISHED6_AT, IpVersion::V6).ipv6());
        rules.push(everywhere(PUBLISHED6, IpVersion::V6).ipv6().to_this_machine());
    }
    rules
}

fn input(uplinks: &str) -> Vec<Rule> {
    vec![
        Rule::new("answers to the host", Action::Accept).from_any(uplinks).established(),
        Rule::new("no VM reaches the host", Action::Drop).from_any(uplinks),
    ]
}

fn forward(uplinks: &str) -> Vec<Rule> {
    let mut rules = vec![
        Rule::new("answers to VMs", Action::Accept).to_any(uplinks).established(),
        Rule::new("published ports", Action::Accept).to_any(uplinks).redirected(),
        Rule::new("no other way into a VM, from another VM too", Action::Drop).to_any(uplinks),
    ];
    // Each VM's own table refuses these as well; here they are seen after what others on this host make of them.
    for net in always_refused() {
        rules.push(Rule::new("metadata and link-local", Action::Drop).from_any(uplinks).destination(net));
    }
    rules
}

fn nat_out(site: &Site, uplinks: &str) -> Vec<Rule> {
    let pool = IpNet::V4(site.pool.ipv4());
    let loopback = IpNet::V4(Ipv4Net::new_assert([127, 0, 0, 0].into(), 8));
    let mut rules = vec![
        Rule::new("published ports used through loopback", Action::Masquerade)
            .ipv4()
            .source(loopback)
            .to_any(uplinks),
    ];
    for net in std::iter::once(pool).chain(site.pool.ipv6().map(IpNet::V6)) {
        rules.push(
            Rule::new("published ports used by a VM", Action::Masquerade)
                .family_of(net)
                .source(net)
                .destination_known(net)
                .redirected(),
        );
    }
    match site.outside {
        Outside::Routed => {}
        Outside::Masquerade => {
            let out = |net: IpNet| {
                Rule::new("VMs are seen under the host's address", Action::Masquerade).family_of(net)
            };
            rules.push(out(pool).source(pool).to_none_of(uplinks));
            if let Some(net) = site.pool.ipv6() {
                rules.push(out(net.into()).source(net.into()).to_none_of(uplinks));
            }
        }
    }
    rules
}

fn sets(site: &Site, vms: &BTreeMap<VmName, VmNetwork>) -> Vec<Set> {
    let mut sets: Vec<Set> =
        [(PUBLISHED_AT, PUBLISHED, KeyPart::Ipv4), (PUBLISHED6_AT, PUBLISHED6, KeyPart::Ipv6)]
            .into_iter()
            .filter(|(_, _, version)| *version == KeyPart::Ipv4 || site.pool.ipv6().is_some())
            .flat_map(|(at, everywhere, version)| {
                [
                    map(at, vec![version, KeyPart::Transport, KeyPart::Port], version),
                    map(everywhere, vec![KeyPart::Transport, KeyPart::Port], version),
                ]
            })
            .collect();
    for (vm, port) in vms.values().flat_map(|vm| vm.publish.iter().map(move |port| (vm, port))) {
        let (name, begin) = match port.on {
            PublishOn::Address(address) if address.is_ipv6() => {
                (PUBLISHED6_AT, Element::default().address(address))
            }
            PublishOn::Address(address) => (PUBLISHED_AT, Element::default().address(address)),
            PublishOn::AnyIpv4 => (PUBLISHED, Element::default()),
            PublishOn::AnyIpv6 => (PUBLISHED6, Element::default()),
        };
        let to = match (port.is_ipv6(), vm.link.ipv6) {
            (false, _) => Some(IpAddr::V4(vm.link.ipv4.vm)),
            (true, ends) => ends.map(|ends| IpAddr::V6(ends.vm)),
        };
        let set = sets.iter_mut().find(|set| set.name == name);
        // A VM without IPv6 publishes nothing over it: it was refused.
        if let (Some(set), Some(to)) = (set, to) {
            let element = begin.transport(port.transport).port(port.host_port);
            set.elements.insert(element.leads_to(to, port.guest_port));
        }
    }
    sets
}

fn map(name: &'static str, key: Vec<KeyPart>, leads_to: KeyPart) -> Set {
    Set {
        name,
        key,
        data: vec![leads_to, KeyPart::Port],
        timed: false,
        size: MOST_PUBLISHED,
        elements: BTreeSet::new(),
    }
}
