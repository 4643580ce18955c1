//! Tables of what is planned for which wish, and a kernel made of maps on which plans are carried out.

use proptest::prelude::*;

use super::*;
use crate::addresses::{Addresses, Pool};
use crate::egress::{Allow, Egress, PortRange, Ports, Scope as NameScope};
use crate::nft::{Chain, Family};
use crate::spec::{Guest, Outside, Publish, PublishOn, Transport};

fn site(outside: Outside) -> Site {
    let pool = Pool::new("10.77.0.0/16".parse().unwrap(), Some("fd77::/64".parse().unwrap())).unwrap();
    Site { name: "imp".parse().unwrap(), pool, outside, mtu: 1500, connections: 4096 }
}

fn facts() -> HostFacts {
    let device: DeviceName = "eth0".parse().unwrap();
    let routes = vec![HostRoute { to: "0.0.0.0/0".parse().unwrap(), device: device.clone() }];
    HostFacts { routes, advertised: [device].into(), ipv6: true, outward_mtu: 1500 }
}

fn guest() -> Guest {
    Guest::ipv4(Mac([6, 0, 0, 0, 0, 2]), "172.16.0.2/30".parse().unwrap(), [172, 16, 0, 1].into()).unwrap()
}

fn vm(addresses: &mut Addresses, name: &str) -> VmNetwork {
    let vm = name.parse().unwrap();
    VmNetwork {
        link: addresses.lease(&vm, &[]).unwrap(),
        vm,
        tap: TapOwner { user: 1, group: 2 },
        guest: guest(),
        publish: Vec::new(),
        egress: Egress::open(),
    }
}

fn one(change: impl FnOnce(&mut VmNetwork)) -> Wanted {
    let site = site(Outside::Masquerade);
    let mut vm = vm(&mut Addresses::new(site.pool), "a");
    change(&mut vm);
    let name = vm.vm.clone();
    wanted(&site, &[(name, vm)].into(), &facts(), &Scope::All)
}

fn rules(wanted: &Wanted, family: Family, chain: &str) -> Vec<String> {
    let side = wanted.vms.values().next().unwrap();
    let table = side.tables.iter().find(|t| t.id.family == family).unwrap();
    let chain: &Chain = table.chains.iter().find(|c| c.name == chain).unwrap();
    chain.rules.iter().map(ToString::to_string).collect()
}

#[test]
fn an_open_policy_lets_all_out_but_metadata() {
    assert_eq!(
        rules(&one(|_| {}), Family::Inet, "forward"),
        [
            "ct state established,related accept",
            "ct state invalid drop",
            "iifname tap0 oifname uplink0 ct count over 4096 drop",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 169.254.0.0/16 reject",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 168.63.129.16 reject",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 100.100.100.200 reject",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 192.0.0.192 reject",
            "iifname tap0 oifname uplink0 accept",
            "iifname uplink0 oifname tap0 ct status dnat accept",
        ]
    );
}

#[test]
fn a_closed_policy_lists_what_opens_and_refuses_the_rest() {
    let port = |first, last| Ports::Only([PortRange { transport: Transport::Tcp, first, last }].into());
    let wanted = one(|vm| {
        vm.egress = Egress::only(vec![
            Allow::Network { to: "10.0.0.0/8".parse().unwrap(), ports: port(80, 80) },
            Allow::Network { to: "10.1.0.0/16".parse().unwrap(), ports: port(1000, 2000) },
            Allow::Network { to: "fd00::/8".parse().unwrap(), ports: Ports::Any },
            Allow::Name {
                name: "a.example".parse().unwrap(),
                ports: port(443, 443),
                scope: NameScope::Public,
            },
        ]);
        vm.egress.refuse = vec!["10.1.2.0/24".parse().unwrap()];
    });
    // The first seven are as above. Without IPv6 its networks are not spoken of.
    assert_eq!(
        rules(&wanted, Family::Inet, "forward")[7..],
        [
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 10.1.2.0/24 reject",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 10.0.0.0/8 meta l4proto tcp th dport 80 accept",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr 10.1.0.0/16 meta l4proto tcp th dport 1000-2000 accept",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr @named4 accept",
            "iifname tap0 oifname uplink0 meta nfproto ipv4 ip daddr . meta l4proto . th dport @named4_ports accept",
            "iifname tap0 oifname uplink0 reject",
            "iifname uplink0 oifname tap0 ct status dnat accept",
        ]
    );
}

#[test]
fn the_tap_takes_the_guests_own_frames_and_ipv6_only_where_wanted() {
    let ipv4 = [
        "ether saddr != 06:00:00:00:00:02 drop",
        "ether type 0x0800 ip saddr 172.16.0.2 accept",
        "ether type 0x0806 arp saddr ether 06:00:00:00:00:02 arp saddr ip 172.16.0.2 accept",
        "ether type 0x0806 arp saddr ether 06:00:00:00:00:02 arp saddr ip 0.0.0.0 accept",
    ];
    assert_eq!(rules(&one(|_| {}), Family::Netdev, "from_guest"), ipv4);
    let both = one(|vm| {
        vm.guest = guest().and_ipv6("fd00::2/64".parse().unwrap(), "fd00::1".parse().unwrap()).unwrap();
    });
    assert_eq!(
        rules(&both, Family::Netdev, "from_guest")[4..],
        [
            "ether type 0x86dd ip6 saddr fd00::2 accept",
            "ether type 0x86dd ip6 saddr fe80::/10 meta l4proto icmpv6 icmp type 133 accept",
            "ether type 0x86dd ip6 saddr fe80::/10 meta l4proto icmpv6 icmp type 135 accept",
            "ether type 0x86dd ip6 saddr fe80::/10 meta l4proto icmpv6 icmp type 136 accept",
            "ether type 0x86dd ip6 saddr :: meta l4proto icmpv6 icmp type 135 accept",
        ]
    );
}

#[test]
fn ipv6_routing_is_turned_on_after_the_host_keeps_its_own_routes() {
    let both = one(|vm| {
        vm.guest = guest().and_ipv6("fd00::2/64".parse().unwrap(), "fd00::1".parse().unwrap()).unwrap();
    });
    let steps = steps(&both, &Seen::default()).unwrap();
    let at = |file: &str| {
        steps
            .iter()
            .position(|s| matches!(s, Step::Set { place: Place::Host, setting, .. } if setting == file))
    };
    let (kept, routing) = (at("net/ipv6/conf/eth0/accept_ra"), at("net/ipv6/conf/all/forwarding"));
    assert!(kept.is_some() && kept < routing, "{kept:?} {routing:?}");
    let without = one(|_| {});
    assert!(
        !without
            .host
            .links
            .settings
            .keys()
            .any(|s| s.ends_with("all/forwarding") || s.ends_with("accept_ra"))
    );
}

#[test]
fn filters_stand_before_the_devices_that_they_filter_are_up() {
    let steps = steps(&one(|_| {}), &Seen::default()).unwrap();
    let first_up = steps.iter().position(|s| matches!(s, Step::SetDevice { .. })).unwrap();
    let last_table = steps.iter().rposition(|s| matches!(s, Step::ReplaceTable { .. })).unwrap();
    assert!(last_table < first_up);
}

#[test]
fn loopback_is_routed_only_for_ports_that_are_published_on_it() {
    let setting = |wanted: &Wanted| {
        let uplink = wanted.uplinks.values().next().unwrap();
        wanted.host.links.settings[&format!("net/ipv4/conf/{uplink}/route_localnet")].clone()
    };
    let publish = |on| Publish { transport: Transport::Tcp, on, host_port: 8080, guest_port: 80 };
    assert_eq!(setting(&one(|_| {})), "0");
    let elsewhere = PublishOn::Address([192, 0, 2, 1].into());
    assert_eq!(setting(&one(|vm| vm.publish.push(publish(elsewhere)))), "0");
    assert_eq!(setting(&one(|vm| vm.publish.push(publish(PublishOn::AnyIpv4)))), "1");
}

#[test]
fn a_device_of_another_vm_is_not_taken() {
    let wanted = one(|_| {});
    let mut seen = Seen::default();
    let uplink = wanted.uplinks.values().next().unwrap().clone();
    for (alias, taken) in
        [(None, false), (Some("imp:a"), false), (Some("imp:b"), true), (Some("a switch"), true)]
    {
        let device = Device { alias: alias.map(str::to_owned), ..wanted.host.links.devices[&uplink].clone() };
        seen.host.links.devices.insert(uplink.clone(), device);
        assert_eq!(steps(&wanted, &seen).is_err(), taken, "{alias:?}");
    }
}

/// A kernel made of maps.
fn carry_out(seen: &mut Seen, step: &Step, wanted: &Wanted) {
    let made = |kind| Device {
        kind,
        mac: Mac([2, 9, 9, 9, 9, 9]),
        mtu: 1500,
        up: false,
        alias: None,
        addresses: BTreeSet::new(),
    };
    match step {
        Step::MakeNamespace { vm } => {
            seen.vms.insert(vm.clone(), SeenNamespace::There(SeenSide::default()));
        }
        Step::RemoveNamespace { vm } => {
            seen.vms.remove(vm);
            remove(&mut seen.host, &wanted.site.name.uplink_of(vm));
        }
        Step::MakeTap { vm, owner } => {
            side(seen, &Place::Vm(vm.clone()))
                .links
                .devices
                .insert(DeviceName::tap(), made(DeviceKind::Tap(*owner)));
        }
        Step::MakeUplink { vm, device } => {
            seen.host.links.devices.insert(device.clone(), made(DeviceKind::Pair));
            let far = side(seen, &Place::Vm(vm.clone()));
            far.links.devices.insert(DeviceName::uplink(), made(DeviceKind::Pair));
        }
        Step::RemoveDevice { place, device } => {
            remove(side(seen, place), device);
            let names: Vec<VmName> = seen.vms.keys().cloned().collect();
            for vm in names.iter().filter(|vm| wanted.site.name.uplink_of(vm) == *device) {
                remove(side(seen, &Place::Vm(vm.clone())), &DeviceName::uplink());
            }
        }
        Step::SetDevice { place, device, mac, mtu, alias } => {
            let device = side(seen, place).links.devices.get_mut(device).unwrap();
            (device.mac, device.mtu, device.up, device.alias) = (*mac, *mtu, true, alias.clone());
        }
        Step::AwaitCarrier { place, device } => {
            assert!(side(seen, place).links.devices[device].up, "nothing takes the device up");
        }
        Step::AddAddress { place, device, address } => {
            side(seen, place).links.devices.get_mut(device).unwrap().addresses.insert(*address);
        }
        Step::RemoveAddress { place, device, address } => {
            side(seen, place).links.devices.get_mut(device).unwrap().addresses.remove(address);
        }
        Step::AddRoute { place, route } => {
            let links = &mut side(seen, place).links;
            assert!(links.devices[&route.device].up, "a route through a device that is down");
            links.routes.insert(route.clone());
        }
        Step::AddNeighbour { place, neighbour } => {
            side(seen, place).links.neighbours.insert(neighbour.clone());
        }
        Step::Set { place, setting, value } => {
            side(seen, place).links.settings.insert(setting.clone(), value.clone());
        }
        Step::ReplaceTable { place, table } => {
            let side = side(seen, place);
            side.tables.insert(table.id.clone(), table.shape());
            if table.id.family == Family::Inet {
                side.elements = table.sets.iter().map(|s| (s.name.to_owned(), s.elements.clone())).collect();
            }
        }
        Step::RemoveTable { place, table } => {
            let side = side(seen, place);
            side.tables.remove(table);
            side.elements.clear();
        }
        Step::AddElements { place, set, elements, .. } => {
            side(seen, place).elements.entry(set.clone()).or_default().extend(elements.iter().cloned());
        }
        Step::RemoveElements { place, set, elements, .. } => {
            let there = side(seen, place).elements.get_mut(set).unwrap();
            for element in elements {
                assert!(there.remove(element), "an element is removed that is not there");
            }
        }
    }
}

fn side<'a>(seen: &'a mut Seen, place: &Place) -> &'a mut SeenSide {
    match place {
        Place::Host => &mut seen.host,
        Place::Vm(vm) => match seen.vms.get_mut(vm) {
            Some(SeenNamespace::There(side)) => side,
            other => panic!("{vm} has no namespace: {other:?}"),
        },
    }
}

fn remove(side: &mut SeenSide, device: &DeviceName) {
    side.links.devices.remove(device);
    side.links.routes.retain(|route| route.device != *device);
    side.links.neighbours.retain(|neighbour| neighbour.device != *device);
    side.links.settings.retain(|setting, _| !setting.contains(&format!("/{device}/")));
    side.tables.retain(|id, _| *device != DeviceName::tap() || id.family != Family::Netdev);
}

/// A wish: for each of three VMs whether it is wanted, which port it publishes, and who owns its tap.
type Wish = [Option<(u16, u32)>; 3];

fn wish() -> impl Strategy<Value = Wish> {
    prop::array::uniform3(prop::option::of((8000u16..8004, 0u32..2)))
}

fn wanted_for(wish: &Wish) -> Wanted {
    let site = site(Outside::Masquerade);
    let mut addresses = Addresses::new(site.pool);
    let mut vms = BTreeMap::new();
    for (name, wish) in ["a", "b", "c"].into_iter().zip(wish) {
        let mut vm = vm(&mut addresses, name);
        if let Some((port, owner)) = wish {
            let publish =
                |on, host_port| Publish { transport: Transport::Tcp, on, host_port, guest_port: 80 };
            vm.publish = vec![publish(PublishOn::Address([192, 0, 2, 1].into()), *port)];
            vm.tap.user = *owner;
            vms.insert(vm.vm.clone(), vm);
        }
    }
    wanted(&site, &vms, &facts(), &Scope::All)
}

proptest! {
    /// Wishes follow each other, and each but the last is broken off after some steps.
    #[test]
    fn after_any_crash_the_next_plan_ends_in_the_same_place(history in prop::collection::vec((wish(), 0usize..60), 1..5), last in wish()) {
        let mut seen = Seen::default();
        for (wish, crash) in history {
            let wanted = wanted_for(&wish);
            for step in steps(&wanted, &seen).unwrap().iter().take(crash) {
                carry_out(&mut seen, step, &wanted);
            }
        }
        let wanted = wanted_for(&last);
        for step in steps(&wanted, &seen).unwrap() {
            carry_out(&mut seen, &step, &wanted);
        }
        prop_assert_eq!(steps(&wanted, &seen).unwrap(), vec![]);
        prop_assert_eq!(seen.vms.keys().collect::<Vec<_>>(), wanted.vms.keys().collect::<Vec<_>>());
        prop_assert_eq!(seen.host.links.devices.keys().collect::<Vec<_>>(), wanted.host.links.devices.keys().collect::<Vec<_>>());
        prop_assert_eq!(seen.host.tables.len(), wanted.host.tables.len());
    }
}
