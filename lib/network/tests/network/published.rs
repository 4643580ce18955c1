//! Ports of guests that are reached through the host.

use std::thread;

use imp_network::egress::Egress;
use imp_network::spec::{Outside, Publish, PublishOn, Transport, VmNetwork};
use imp_network::{NetworkError, Networks};
use imp_sys::netns;
use std::os::fd::AsFd;

use crate::world::guest::Guest;
use crate::world::{HOST, HOST6, World, at, fetch, on_own_host};

fn published(on: PublishOn, host_port: u16) -> Publish {
    Publish { transport: Transport::Tcp, on, host_port, guest_port: 80 }
}

fn connected(world: &mut World<'_>, publish: Publish) -> (Networks, VmNetwork, Guest) {
    let networks = world.networks();
    let vm = VmNetwork { publish: vec![publish], ..world.vm("a", Egress::open()) };
    networks.connect(vm.clone()).unwrap();
    let guest = Guest::new(&networks, &vm.vm);
    (networks, vm, guest)
}

/// Fetches in the calling thread's namespace while the guest serves.
fn fetch_from(guest: &mut Guest, address: &str, port: u16) -> String {
    let here = netns::current().unwrap();
    let to = at(address, port);
    let client = thread::spawn(move || netns::inside(here.as_fd(), || fetch(to)).unwrap());
    guest.serve_once(80, "from the guest");
    client.join().unwrap().unwrap()
}

#[test]
fn a_port_published_everywhere_is_reached_from_outside_and_from_the_host_itself() {
    on_own_host(Outside::Masquerade, |world| {
        let (networks, _vm, mut guest) = connected(world, published(PublishOn::AnyIpv4, 8080));
        assert_eq!(world.out_there(|| fetch_from(&mut guest, HOST, 8080)), "from the guest");
        assert_eq!(fetch_from(&mut guest, HOST, 8080), "from the guest");
        assert_eq!(fetch_from(&mut guest, "127.0.0.1", 8080), "from the guest");
        assert_eq!(networks.pending().unwrap(), []);
    });
}

#[test]
fn a_port_published_on_loopback_is_for_the_host_alone() {
    on_own_host(Outside::Masquerade, |world| {
        let (_networks, _vm, mut guest) =
            connected(world, published(PublishOn::Address([127, 0, 0, 1].into()), 8080));
        assert_eq!(fetch_from(&mut guest, "127.0.0.1", 8080), "from the guest");
        let refused = world.out_there(|| fetch(at(HOST, 8080)));
        assert_eq!(refused.map_err(|e| e.kind()), Err(std::io::ErrorKind::ConnectionRefused));
    });
}

#[test]
fn a_port_published_over_ipv6_is_reached_from_outside_from_the_host_and_from_another_vm() {
    on_own_host(Outside::Masquerade, |world| {
        let networks = world.networks();
        let mut vm = world.vm("a", Egress::open());
        vm.publish = vec![published(PublishOn::AnyIpv6, 8080)];
        assert!(matches!(networks.connect(vm.clone()), Err(NetworkError::PublishIpv6 { .. })));
        let both = world.with_ipv6();
        vm.guest = both.clone();
        vm.publish.push(published(PublishOn::Address("::1".parse().unwrap()), 8082));
        assert!(matches!(networks.connect(vm.clone()), Err(NetworkError::PublishLoopback6 { .. })));
        vm.publish[1] = published(PublishOn::Address(HOST6.parse().unwrap()), 8081);
        networks.connect(vm.clone()).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        let mut guest = Guest::new(&networks, &vm.vm);
        for port in [8080, 8081] {
            assert_eq!(world.out_there(|| fetch_from(&mut guest, HOST6, port)), "from the guest");
            assert_eq!(fetch_from(&mut guest, HOST6, port), "from the guest");
        }
        // Of IPv4 nothing was said.
        let refused = fetch(at(HOST, 8080)).map_err(|e| e.kind());
        assert_eq!(refused, Err(std::io::ErrorKind::ConnectionRefused));
        let other = VmNetwork { guest: both, ..world.vm("b", Egress::open()) };
        networks.connect(other.clone()).unwrap();
        thread::scope(|scope| {
            let mut asking = Guest::new(&networks, &other.vm);
            let asked = scope.spawn(move || asking.fetch(at(HOST6, 8080)));
            guest.serve_once(80, "from the guest");
            assert_eq!(asked.join().unwrap(), "from the guest");
        });
    });
}

#[test]
fn a_vm_uses_a_published_port_of_another_and_of_itself() {
    on_own_host(Outside::Masquerade, |world| {
        let (networks, _vm, mut serving) = connected(world, published(PublishOn::AnyIpv4, 8080));
        let other = world.vm("b", Egress::open());
        networks.connect(other.clone()).unwrap();
        thread::scope(|scope| {
            let mut asking = Guest::new(&networks, &other.vm);
            let asked = scope.spawn(move || asking.fetch(at(HOST, 8080)));
            serving.serve_once(80, "from the guest");
            assert_eq!(asked.join().unwrap(), "from the guest");
        });
        serving.serve_meanwhile(80, "from itself");
        assert_eq!(serving.fetch(at(HOST, 8080)), "from itself");
    });
}

#[test]
fn a_port_that_comes_or_goes_leaves_the_others_as_they_are() {
    on_own_host(Outside::Masquerade, |world| {
        let (networks, mut vm, mut guest) = connected(world, published(PublishOn::AnyIpv4, 8080));
        vm.publish.push(published(PublishOn::AnyIpv4, 8081));
        networks.connect(vm.clone()).unwrap();
        vm.publish.remove(0);
        networks.connect(vm.clone()).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        assert_eq!(fetch_from(&mut guest, HOST, 8081), "from the guest");
        let gone = fetch(at(HOST, 8080));
        assert_eq!(gone.map_err(|e| e.kind()), Err(std::io::ErrorKind::ConnectionRefused));
    });
}

#[test]
fn a_port_is_published_by_one_vm_at_a_time() {
    on_own_host(Outside::Masquerade, |world| {
        let (networks, vm, _guest) = connected(world, published(PublishOn::AnyIpv4, 8080));
        let mut other = world.vm("b", Egress::open());
        other.publish = vec![published(PublishOn::Address([127, 0, 0, 1].into()), 8080)];
        assert!(matches!(networks.connect(other.clone()), Err(NetworkError::PortTaken { .. })));
        networks.disconnect(&vm.vm).unwrap();
        networks.connect(other).unwrap();
    });
}
