//! The VM's side: tap and uplink, anti-spoofing, egress policy, address translation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Device, DeviceKind, HOST_END_MAC, HostFacts, Links, Neighbour, Route, VM_END_MAC};
use crate::egress::{Allow, Egress, Otherwise, Ports, always_refused};
use crate::names::{DeviceName, SiteName};
use crate::nft::{Action, Chain, Element, Family, Field, Hook, KeyPart, Policy, Rule, Set, Table, TableId};
use crate::spec::{Guest, Mac, Site, Transport, VmNetwork};

/// Addresses that names opened, for every port and protocol.
const NAMED4: &str = "named4";
const NAMED6: &str = "named6";
/// Addresses that names opened, for one port of one protocol each.
const NAMED4_PORTS: &str = "named4_ports";
const NAMED6_PORTS: &str = "named6_ports";

/// Of each of the sets above: what a VM can make the kernel remember.
const MOST_NAMED: u32 = 8192;

const DNS: u16 = 53;

/// Conversations with the gateway that a VM may have open at once.
const MOST_QUESTIONS: u32 = 512;

mod ether_type {
    pub(super) const IPV4: u16 = 0x0800;
    pub(super) const ARP: u16 = 0x0806;
    pub(super) const IPV6: u16 = 0x86dd;
}

mod icmp6 {
    pub(super) const ROUTER_SOLICITATION: u8 = 133;
    pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub(super) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
}

/// Messages of ICMPv6 by which neighbours find each other.
pub(super) const NEIGHBOURS: [u8; 2] = [icmp6::NEIGHBOUR_SOLICITATION, icmp6::NEIGHBOUR_ADVERTISEMENT];

pub(crate) fn id(site: &SiteName) -> TableId {
    TableId { family: Family::Inet, name: site.table().to_owned() }
}

/// The sets, and the elements in them, that let packets to this address pass.
pub(crate) fn named_elements(address: IpAddr, ports: &Ports) -> Vec<(&'static str, Element)> {
    let (any, with_port) = match address {
        IpAddr::V4(_) => (NAMED4, NAMED4_PORTS),
        IpAddr::V6(_) => (NAMED6, NAMED6_PORTS),
    };
    let element = || Element::default().address(address);
    match ports {
        Ports::Any => vec![(any, element())],
        Ports::Only(ranges) => ranges
            .iter()
            .flat_map(|range| (range.first..=range.last).map(|port| (range.transport, port)))
            .map(|(transport, port)| (with_port, element().transport(transport).port(port)))
            .collect(),
    }
}

pub(super) fn links(site: &Site, vm: &VmNetwork, facts: &HostFacts) -> Links {
    let (tap, uplink) = (DeviceName::tap(), DeviceName::uplink());
    let guest = &vm.guest;
    let mut tap_addresses: BTreeSet<IpNet> = [guest.gateway().into()].into();
    let mut uplink_addresses: BTreeSet<IpNet> = [Ipv4Net::new_assert(vm.link.ipv4.vm, 31).into()].into();
    let mut routes: BTreeSet<Route> =
        [Route { to: Ipv4Net::default().into(), via: vm.link.ipv4.host.into(), device: uplink.clone() }]
            .into();
    let neighbour =
        |address, mac: Mac, device: &DeviceName| Neighbour { address, mac, device: device.clone() };
    let mut neighbours: BTreeSet<Neighbour> = [
        neighbour(guest.address().into(), guest.mac(), &tap),
        neighbour(vm.link.ipv4.host.into(), HOST_END_MAC, &uplink),
    ]
    .into();
    let mut settings: BTreeMap<String, String> = [
        ("net/ipv4/conf/tap0/arp_ignore", "1"),
        ("net/ipv4/conf/tap0/rp_filter", "1"),
        ("net/ipv4/conf/tap0/send_redirects", "0"),
        ("net/ipv4/ip_forward", "1"),
    ]
    .map(|(file, value)| (file.to_owned(), value.to_owned()))
    .into();
    let mut set = |file: &str, value: &str| settings.insert(file.to_owned(), value.to_owned());
    if let (Some(address), Some(gateway), Some(ends)) = (guest.address6(), guest.gateway6(), vm.link.ipv6) {
        tap_addresses.insert(gateway.into());
        uplink_addresses.insert(Ipv6Net::new_assert(ends.vm, 127).into());
        routes.insert(Route { to: Ipv6Net::default().into(), via: ends.host.into(), device: uplink.clone() });
        neighbours.insert(neighbour(address.into(), guest.mac(), &tap));
        neighbours.insert(neighbour(ends.host.into(), HOST_END_MAC, &uplink));
        set("net/ipv6/conf/all/forwarding", "1");
        set("net/ipv6/conf/tap0/accept_ra", "0");
        set("net/ipv6/conf/uplink0/accept_ra", "0");
    } else if facts.ipv6 {
        set("net/ipv6/conf/all/disable_ipv6", "1");
        set("net/ipv6/conf/default/disable_ipv6", "1");
    }
    let device = |kind, mac, addresses| Device { kind, mac, mtu: site.mtu, up: true, alias: None, addresses };
    Links {
        devices: [
            (tap, device(DeviceKind::Tap(vm.tap), Mac::GATEWAY, tap_addresses)),
            (uplink, device(DeviceKind::Pair, VM_END_MAC, uplink_addresses)),
        ]
        .into(),
        routes,
        neighbours,
        settings,
    }
}

/// What the tap may receive from the guest at all: its own MAC address with its own addresses.
pub(super) fn spoofing_table(site: &SiteName, guest: &Guest) -> Table {
    let own4 = IpNet::V4(guest.address().into());
    let mut rules = vec![
        Rule::new("not the guest's MAC", Action::Drop).ether_source_is_not(guest.mac()),
        Rule::new("the guest's IPv4", Action::Accept).ether_type(ether_type::IPV4).source(own4),
        Rule::new("ARP as itself", Action::Accept)
            .ether_type(ether_type::ARP)
            .arp_sender(guest.mac(), guest.address()),
        Rule::new("ARP before it uses its address", Action::Accept)
            .ether_type(ether_type::ARP)
            .arp_sender(guest.mac(), std::net::Ipv4Addr::UNSPECIFIED),
    ];
    if let Some(address) = guest.address6() {
        let from = |net: IpNet| {
            Rule::new("the guest's IPv6", Action::Accept).ether_type(ether_type::IPV6).source(net)
        };
        rules.push(from(IpNet::V6(address.into())));
        let link_local = IpNet::V6(Ipv6Net::new_assert([0xfe80, 0, 0, 0, 0, 0, 0, 0].into(), 10));
        for kind in
            [icmp6::ROUTER_SOLICITATION, icmp6::NEIGHBOUR_SOLICITATION, icmp6::NEIGHBOUR_ADVERTISEMENT]
        {
            rules.push(from(link_local).icmp6(kind));
        }
        let unspecified = IpNet::V6(std::net::Ipv6Addr::UNSPECIFIED.into());
        rules.push(from(unspecified).icmp6(icmp6::NEIGHBOUR_SOLICITATION));
    }
    Table {
        id: TableId { family: Family::Netdev, name: site.table().to_owned() },
        sets: Vec::new(),
        chains: vec![Chain {
            name: "from_guest",
            hook: Hook::Ingress(DeviceName::tap()),
            policy: Policy::Drop,
            rules,
        }],
    }
}

pub(super) fn table(site: &Site, vm: &VmNetwork) -> Table {
    let chain = |name, hook, policy, rules| Chain { name, hook, policy, rules };
    Table {
        id: id(&site.name),
        sets: sets(&vm.egress),
        chains: vec![
            chain("published", Hook::NatIn, Policy::Accept, published(vm)),
            chain("input", Hook::Input, Policy::Drop, input(&vm.guest)),
            chain("forward", Hook::Forward, Policy::Drop, forward(site, vm)),
            chain("nat_out", Hook::NatOut, Policy::Accept, nat_out()),
        ],
    }
}

fn published(vm: &VmNetwork) -> Vec<Rule> {
    let ports: BTreeSet<(Transport, u16)> = vm.publish.iter().map(|p| (p.transport, p.guest_port)).collect();
    let ipv6 = vm.link.ipv6.zip(vm.guest.address6());
    let mut ends = vec![(IpAddr::V4(vm.link.ipv4.vm), IpAddr::V4(vm.guest.address()))];
    ends.extend(ipv6.map(|(link, guest)| (IpAddr::V6(link.vm), IpAddr::V6(guest))));
    ends.into_iter()
        .flat_map(|(uplink, guest)| ports.iter().map(move |port| (uplink, guest, *port)))
        .map(|(uplink, guest, (transport, port))| {
            Rule::new("published ports", Action::SendTo(guest, port))
                .from(&DeviceName::uplink())
                .destination(IpNet::from(uplink))
                .ports(transport, port, port)
        })
        .collect()
}

fn input(guest: &Guest) -> Vec<Rule> {
    let mut rules = vec![Rule::new("answers", Action::Accept).established()];
    rules.extend(questions(guest));
    if guest.address6().is_some() {
        rules.extend(NEIGHBOURS.map(|kind| Rule::new("neighbours", Action::Accept).ipv6().icmp6(kind)));
    }
    rules
}

/// What the guest may say to its gateway: nothing, but for names and whether it is there.
pub(super) fn questions(guest: &Guest) -> Vec<Rule> {
    let tap = DeviceName::tap();
    let gateway = IpNet::V4(guest.gateway().addr().into());
    let mut rules =
        vec![Rule::new("too many questions", Action::Drop).from(&tap).connections_over(MOST_QUESTIONS)];
    let mut gateways = vec![gateway];
    gateways.extend(guest.gateway6().map(|net| IpNet::V6(net.addr().into())));
    for gateway in gateways {
        for transport in [Transport::Udp, Transport::Tcp] {
            rules.push(
                Rule::new("questions for names", Action::Accept)
                    .from(&tap)
                    .destination(gateway)
                    .ports(transport, DNS, DNS),
            );
        }
    }
    rules.push(
        Rule::new("is the gateway there", Action::Accept).from(&tap).icmp_echo().destination_known(gateway),
    );
    rules
}

fn forward(site: &Site, vm: &VmNetwork) -> Vec<Rule> {
    let (tap, uplink) = (DeviceName::tap(), DeviceName::uplink());
    let mut rules = vec![
        Rule::new("answers", Action::Accept).established(),
        // They are not translated: outside they would be seen with the guest's own address.
        Rule::new("packets of no connection", Action::Drop).of_no_connection(),
    ];
    rules.extend(policy(&uplink, &vm.guest, &vm.egress, site.connections));
    rules.push(Rule::new("published ports", Action::Accept).from(&uplink).to(&tap).redirected());
    rules
}

/// What becomes of connections that the guest opens; the last rule is for all that no other is for.
pub(super) fn policy(uplink: &DeviceName, guest: &Guest, egress: &Egress, connections: u32) -> Vec<Rule> {
    let tap = DeviceName::tap();
    let speaks = |net: &IpNet| matches!(net, IpNet::V4(_)) || guest.address6().is_some();
    let out = |why, action| Rule::new(why, action).from(&tap).to(uplink);
    let mut rules = vec![out("too many connections", Action::Drop).connections_over(connections)];
    for net in always_refused().into_iter().filter(speaks) {
        rules.push(out("metadata and link-local", Action::Reject).destination(net));
    }
    for net in egress.refuse.iter().filter(|net| speaks(net)) {
        rules.push(out("refused by policy", Action::Reject).destination(*net));
    }
    let mut names = false;
    for allow in &egress.allow {
        match allow {
            Allow::Network { to, ports: Ports::Any } if speaks(to) => {
                rules.push(out("allowed network", Action::Accept).destination(*to));
            }
            Allow::Network { to, ports: Ports::Only(ranges) } if speaks(to) => {
                rules.extend(ranges.iter().map(|range| {
                    let rule = out("allowed network and port", Action::Accept).destination(*to);
                    rule.ports(range.transport, range.first, range.last)
                }));
            }
            Allow::Network { .. } => {}
            Allow::Name { .. } => names = true,
        }
    }
    if names {
        let port = [Field::Transport, Field::DestinationPort];
        let named = || out("allowed by name", Action::Accept);
        let with_port = |address: Field| [vec![address], port.to_vec()].concat();
        rules.push(named().ipv4().in_set(vec![Field::Destination4], NAMED4));
        rules.push(named().ipv4().in_set(with_port(Field::Destination4), NAMED4_PORTS));
        if guest.address6().is_some() {
            rules.push(named().ipv6().in_set(vec![Field::Destination6], NAMED6));
            rules.push(named().ipv6().in_set(with_port(Field::Destination6), NAMED6_PORTS));
        }
    }
    rules.push(match egress.otherwise {
        Otherwise::Allow => out("everything else", Action::Accept),
        Otherwise::Refuse => out("nothing else", Action::Reject),
    });
    rules
}

fn nat_out() -> Vec<Rule> {
    vec![Rule::new("many guests have this address", Action::Masquerade).to(&DeviceName::uplink())]
}

pub(super) fn sets(egress: &Egress) -> Vec<Set> {
    if !egress.allow.iter().any(|allow| matches!(allow, Allow::Name { .. })) {
        return Vec::new();
    }
    let set = |name, key| Set {
        name,
        key,
        data: Vec::new(),
        timed: true,
        size: MOST_NAMED,
        elements: BTreeSet::new(),
    };
    vec![
        set(NAMED4, vec![KeyPart::Ipv4]),
        set(NAMED6, vec![KeyPart::Ipv6]),
        set(NAMED4_PORTS, vec![KeyPart::Ipv4, KeyPart::Transport, KeyPart::Port]),
        set(NAMED6_PORTS, vec![KeyPart::Ipv6, KeyPart::Transport, KeyPart::Port]),
    ]
}
