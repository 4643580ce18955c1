//! A VM in a namespace that somebody else keeps: the tap, and filters that judge the guest's packets only.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::diff::{fit, make_taps, tables};
use super::vm::{self, policy, questions, sets, spoofing_table};
use super::{Device, DeviceKind, HostFacts, Links, Neighbour, Place, SeenSide, Step, WantedSide};
use crate::borrowed::Lodger;
use crate::names::{DeviceName, SiteName, VmName};
use crate::nft::{Action, Chain, Hook, Policy, Rule, Table};
use crate::spec::Mac;

pub(crate) fn lodging(site: &SiteName, lodger: &Lodger, facts: &HostFacts) -> WantedSide {
    WantedSide {
        links: links(lodger, facts),
        tables: vec![spoofing_table(site, &lodger.guest), table(site, lodger)],
    }
}

/// What to do, in order: filters stand before the tap is up.
pub(crate) fn lodging_steps(vm: &VmName, wanted: &WantedSide, seen: &SeenSide) -> Vec<Step> {
    let (mut steps, place) = (Vec::new(), Place::Vm(vm.clone()));
    make_taps(&mut steps, vm, wanted, seen);
    tables(&mut steps, &place, wanted, seen);
    fit(&mut steps, &place, &wanted.links, &seen.links);
    steps
}

/// The tap goes first: without filters it would be open.
pub(crate) fn lodging_removal(vm: &VmName, seen: &SeenSide) -> Vec<Step> {
    let place = || Place::Vm(vm.clone());
    let taps = seen.links.devices.iter().filter(|(_, device)| matches!(device.kind, DeviceKind::Tap(_)));
    let taps = taps.map(|(device, _)| Step::RemoveDevice { place: place(), device: device.clone() });
    let tables = seen.tables.keys().map(|table| Step::RemoveTable { place: place(), table: table.clone() });
    taps.chain(tables).collect()
}

fn links(lodger: &Lodger, facts: &HostFacts) -> Links {
    let (tap, guest) = (DeviceName::tap(), &lodger.guest);
    let mut addresses = vec![IpNet::V4(guest.gateway())];
    let mut neighbours = vec![guest.address().into()];
    let mut settings: BTreeMap<String, String> = BTreeMap::new();
    let mut set = |file: &str, value: &str| settings.insert(file.to_owned(), value.to_owned());
    set("net/ipv4/conf/tap0/arp_ignore", "1");
    set("net/ipv4/conf/tap0/rp_filter", "1");
    set("net/ipv4/conf/tap0/send_redirects", "0");
    set("net/ipv4/ip_forward", "1");
    if let (Some(address), Some(gateway)) = (guest.address6(), guest.gateway6()) {
        addresses.push(IpNet::V6(gateway));
        neighbours.push(address.into());
        set("net/ipv6/conf/tap0/accept_ra", "0");
        // A namespace that forwards stops listening to router advertisements, and loses its own routes, unless told.
        for device in facts.advertised.iter().filter(|device| **device != tap) {
            set(&format!("net/ipv6/conf/{device}/accept_ra"), "2");
        }
        set("net/ipv6/conf/all/forwarding", "1");
    } else if facts.ipv6 {
        set("net/ipv6/conf/tap0/disable_ipv6", "1");
    }
    let device = Device {
        kind: DeviceKind::Tap(lodger.tap),
        mac: Mac::GATEWAY,
        mtu: lodger.mtu,
        up: true,
        alias: None,
        addresses: addresses.into_iter().collect(),
    };
    let neighbour = |address| Neighbour { address, mac: guest.mac(), device: tap.clone() };
    Links {
        neighbours: neighbours.into_iter().map(neighbour).collect(),
        devices: [(tap.clone(), device)].into(),
        routes: std::collections::BTreeSet::new(),
        settings,
    }
}

fn table(site: &SiteName, lodger: &Lodger) -> Table {
    // Other people's packets come through these chains as well: what no rule is about goes on.
    let chain = |name, hook, rules| Chain { name, hook, policy: Policy::Accept, rules };
    Table {
        id: vm::id(site),
        sets: sets(&lodger.egress),
        chains: vec![
            chain("input", Hook::Input, input(lodger)),
            chain("forward", Hook::Forward, forward(lodger)),
            chain("nat_out", Hook::NatOut, nat_out(lodger)),
        ],
    }
}

fn input(lodger: &Lodger) -> Vec<Rule> {
    let tap = DeviceName::tap();
    let mut rules = vec![Rule::new("answers", Action::Accept).from(&tap).established()];
    rules.extend(questions(&lodger.guest));
    if lodger.guest.address6().is_some() {
        rules.extend(
            vm::NEIGHBOURS.map(|kind| Rule::new("neighbours", Action::Accept).from(&tap).ipv6().icmp6(kind)),
        );
    }
    rules.push(Rule::new("nothing else of this namespace", Action::Drop).from(&tap));
    rules
}

fn forward(lodger: &Lodger) -> Vec<Rule> {
    let tap = DeviceName::tap();
    let mut rules = vec![
        Rule::new("answers", Action::Accept).from(&tap).to(&lodger.uplink).established(),
        Rule::new("answers to the guest", Action::Accept).to(&tap).established(),
        Rule::new("packets of no connection", Action::Drop).from(&tap).of_no_connection(),
    ];
    rules.extend(policy(&lodger.uplink, &lodger.guest, &lodger.egress, lodger.connections));
    rules.push(Rule::new("no other way out", Action::Drop).from(&tap));
    rules.push(Rule::new("no way in", Action::Drop).to(&tap));
    rules
}

fn nat_out(lodger: &Lodger) -> Vec<Rule> {
    let guest = &lodger.guest;
    let mut own = vec![IpNet::V4(guest.address().into())];
    own.extend(guest.address6().map(|address| IpNet::V6(address.into())));
    let masquerade = |net: IpNet| {
        Rule::new("the guest is seen under this namespace's address", Action::Masquerade)
            .family_of(net)
            .source(net)
            .to(&lodger.uplink)
    };
    own.into_iter().map(masquerade).collect()
}
