//! What is kept from a guest, and what is kept from everybody else because of it.
//!
//! That a packet is dropped is seen by what comes after it: the next one arrives, and nothing before it.

use std::net::SocketAddr;
use std::sync::mpsc::Receiver;

use imp_network::Networks;
use imp_network::egress::{Allow, Egress, PortRange, Ports};
use imp_network::spec::{Mac, Outside, Transport, VmNetwork};

use crate::world::guest::{Guest, udp_frame};
use crate::world::{DEADLINE, GUEST_MAC, HOST, METADATA, OTHER_SERVER, SERVER, World, at, ip, on_own_host};

fn connected(world: &mut World<'_>, egress: Egress) -> (Networks, VmNetwork, Guest) {
    let networks = world.networks();
    let vm = world.vm("a", egress);
    networks.connect(vm.clone()).unwrap();
    let guest = Guest::new(&networks, &vm.vm);
    (networks, vm, guest)
}

fn next(arrivals: &Receiver<(SocketAddr, Vec<u8>)>) -> String {
    String::from_utf8(arrivals.recv_timeout(DEADLINE).expect("no datagram arrived").1).unwrap()
}

#[test]
fn a_spoofed_mac_or_address_goes_nowhere() {
    on_own_host(Outside::Masquerade, |world| {
        let arrivals = world.collect_udp(9).unwrap();
        let (_networks, _vm, mut guest) = connected(world, Egress::open());
        let to = at(SERVER, 9);
        let own = [172, 16, 0, 2];
        let frame = |mac, address, text| udp_frame(mac, Mac::GATEWAY, address, to, text);
        let other_mac = Mac([0x06, 0, 0, 0, 0, 9]);
        guest.inject(&frame(other_mac, own, "another MAC"));
        guest.inject(&frame(GUEST_MAC, [172, 16, 0, 3], "another address"));
        guest.inject(&frame(GUEST_MAC, [192, 0, 2, 1], "the host's address"));
        guest.inject(&frame(GUEST_MAC, [127, 0, 0, 1], "loopback"));
        guest.inject(&frame(GUEST_MAC, own, "itself"));
        assert_eq!(next(&arrivals), "itself");
    });
}

#[test]
fn a_guest_that_answers_for_its_gateway_changes_nobodys_mind() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let (networks, vm, mut guest) = connected(world, Egress::open());
        // An ARP answer: the gateway's address, and the uplink's, are at the guest's MAC.
        for address in [[172, 16, 0, 1], vm.link.ipv4.host.octets()] {
            let mut frame = [Mac::GATEWAY.0, GUEST_MAC.0].concat();
            frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2]);
            frame.extend(GUEST_MAC.0);
            frame.extend(address);
            frame.extend(Mac::GATEWAY.0);
            frame.extend([172, 16, 0, 1]);
            guest.inject(&frame);
        }
        assert_eq!(guest.fetch(at(SERVER, 80)), HOST);
        assert_eq!(networks.pending().unwrap(), []);
    });
}

#[test]
fn metadata_is_refused_whatever_the_policy_allows() {
    let everything = Allow::Network { to: "0.0.0.0/0".parse().unwrap(), ports: Ports::Any };
    for egress in [Egress::open(), Egress::only(vec![everything])] {
        on_own_host(Outside::Masquerade, |world| {
            let arrivals = world.collect_udp(80).unwrap();
            let (_networks, _vm, mut guest) = connected(world, egress);
            guest.send(at(METADATA, 80), "metadata");
            guest.until_refused(at(METADATA, 80));
            guest.send(at("169.254.7.7", 80), "link-local");
            guest.until_refused(at("169.254.7.7", 80));
            guest.send(at(SERVER, 80), "server");
            assert_eq!(next(&arrivals), "server");
        });
    }
}

#[test]
fn a_closed_policy_opens_the_networks_and_ports_that_it_lists() {
    let port = |transport, first, last| Ports::Only([PortRange { transport, first, last }].into());
    let egress = Egress::only(vec![
        Allow::Network { to: "192.0.2.0/24".parse().unwrap(), ports: port(Transport::Udp, 1000, 1009) },
        Allow::Network { to: "198.51.100.7/32".parse().unwrap(), ports: Ports::Any },
    ]);
    on_own_host(Outside::Masquerade, |world| {
        let (in_range, beyond) = (world.collect_udp(1009).unwrap(), world.collect_udp(1010).unwrap());
        world.serve_tcp(1005).unwrap();
        let (_networks, _vm, mut guest) = connected(world, egress);
        guest.send(at(SERVER, 1009), "in range");
        assert_eq!(next(&in_range), "in range");
        guest.send(at(SERVER, 1010), "beyond");
        guest.until_refused(at(SERVER, 1010));
        guest.send(at(OTHER_SERVER, 1010), "any port");
        assert_eq!(next(&beyond), "any port");
        assert_eq!(guest.fetch(at(OTHER_SERVER, 1005)), HOST);
    });
}

#[test]
fn what_a_policy_refuses_stays_shut_in_an_open_one() {
    let mut egress = Egress::open();
    egress.refuse = vec!["198.51.100.0/24".parse().unwrap()];
    on_own_host(Outside::Masquerade, |world| {
        let arrivals = world.collect_udp(9).unwrap();
        let (_networks, _vm, mut guest) = connected(world, egress);
        guest.send(at(OTHER_SERVER, 9), "refused");
        guest.until_refused(at(OTHER_SERVER, 9));
        guest.send(at(SERVER, 9), "open");
        assert_eq!(next(&arrivals), "open");
    });
}

#[test]
fn a_vm_reaches_neither_the_host_nor_another_vm() {
    on_own_host(Outside::Masquerade, |world| {
        let host = std::net::UdpSocket::bind(("0.0.0.0", 9)).unwrap();
        let arrivals = world.collect_udp(9).unwrap();
        let networks = world.networks();
        let (a, b) = (world.vm("a", Egress::open()), world.vm("b", Egress::open()));
        networks.connect(a.clone()).unwrap();
        networks.connect(b.clone()).unwrap();
        let other = networks.inside(&b.vm, || std::net::UdpSocket::bind(("0.0.0.0", 9)).unwrap()).unwrap();
        let mut guest = Guest::new(&networks, &a.vm);
        for address in [HOST.parse().unwrap(), a.link.ipv4.host, b.link.ipv4.host, b.link.ipv4.vm] {
            guest.send(SocketAddr::new(address.into(), 9), "to host or VM");
        }
        guest.send(at(SERVER, 9), "to the world");
        assert_eq!(next(&arrivals), "to the world");
        // The other's own filter would drop it as well; it does not even come that far.
        let arrived = networks.inside(&b.vm, || ip("-s -o link show uplink0")).unwrap();
        let received: Vec<&str> = arrived.split("\\").nth(3).unwrap().split_whitespace().collect();
        assert_eq!(received[..2], ["0", "0"], "{arrived}");
        for socket in [host, other] {
            socket.set_nonblocking(true).unwrap();
            let received = socket.recv(&mut [0; 64]);
            assert_eq!(received.map_err(|e| e.kind()), Err(std::io::ErrorKind::WouldBlock));
        }
    });
}

#[test]
fn without_ipv6_nothing_of_it_leaves_the_tap() {
    on_own_host(Outside::Masquerade, |world| {
        let (networks, vm, mut guest) = connected(world, Egress::open());
        world.serve_tcp(80).unwrap();
        // A neighbour solicitation from the unspecified address: what every IPv6 host sends first.
        let mut frame = vec![0x33, 0x33, 0xff, 0, 0, 1];
        frame.extend(GUEST_MAC.0);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, 255]);
        frame.extend([0; 16]);
        frame.extend("ff02::1:ff00:1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        guest.inject(&frame);
        assert_eq!(guest.fetch(at(SERVER, 80)), HOST);
        let counted =
            networks.inside(&vm.vm, || std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap());
        let received =
            counted.unwrap().lines().find(|line| line.starts_with("Ip6InReceives")).unwrap().to_owned();
        assert!(received.ends_with("\t0") || received.ends_with(" 0"), "{received}");
    });
}

#[test]
fn a_policy_that_is_closed_later_holds_for_what_is_begun_later() {
    on_own_host(Outside::Masquerade, |world| {
        let arrivals = world.collect_udp(9).unwrap();
        let (networks, mut vm, mut guest) = connected(world, Egress::open());
        guest.send(at(SERVER, 9), "open");
        assert_eq!(next(&arrivals), "open");
        vm.egress = Egress::only(Vec::new());
        networks.connect(vm).unwrap();
        guest.send(at(SERVER, 9), "closed");
        guest.until_refused(at(SERVER, 9));
        assert!(arrivals.try_recv().is_err());
    });
}

#[test]
fn a_flood_of_connections_fills_no_table_of_the_host_and_harms_no_other_vm() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let arrivals = world.collect_udp(9).unwrap();
        world.site.connections = 8;
        let networks = world.networks();
        let (flooding, other) = (world.vm("a", Egress::open()), world.vm("b", Egress::open()));
        networks.connect(flooding.clone()).unwrap();
        networks.connect(other.clone()).unwrap();
        let tracked = || {
            let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap();
            count.trim().parse::<u32>().unwrap()
        };
        let mut guest = Guest::new(&networks, &flooding.vm);
        let held = guest.send(at(SERVER, 9), "the first");
        assert_eq!(next(&arrivals), "the first");
        for port in 10_000..10_200 {
            let to = at(OTHER_SERVER, port);
            guest.inject(&udp_frame(GUEST_MAC, Mac::GATEWAY, [172, 16, 0, 2], to, "flood"));
        }
        guest.until("the flood", |_| (tracked() == 8).then_some(()));
        // What is open stays open, and the other VM opens what it likes.
        guest.send_on(held, at(SERVER, 9), "still open");
        assert_eq!(next(&arrivals), "still open");
        assert_eq!(tracked(), 8);
        assert_eq!(Guest::new(&networks, &other.vm).fetch(at(SERVER, 80)), HOST);
    });
}
