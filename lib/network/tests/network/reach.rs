//! Guests reach the world, and the world sees who they are.

use std::time::Duration;

use imp_network::NetworkError;
use imp_network::egress::Egress;
use imp_network::spec::Outside;

use crate::world::guest::Guest;
use crate::world::{DEADLINE, HOST, SERVER, at, on_own_host};

#[test]
fn two_vms_with_one_inner_address_are_told_apart_outside() {
    on_own_host(Outside::Routed, |world| {
        world.serve_tcp(80).unwrap();
        let networks = world.networks();
        let (a, b) = (world.vm("a", Egress::open()), world.vm("b", Egress::open()));
        let mut guests = Vec::new();
        for vm in [&a, &b] {
            networks.connect(vm.clone()).unwrap();
            guests.push(Guest::new(&networks, &vm.vm));
        }
        for (vm, guest) in [&a, &b].into_iter().zip(&mut guests) {
            assert_eq!(guest.fetch(at(SERVER, 80)), vm.link.ipv4.vm.to_string());
        }
    });
}

#[test]
fn outside_a_masqueraded_vm_is_seen_under_the_hosts_address() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let networks = world.networks();
        for name in ["a", "b"] {
            let vm = world.vm(name, Egress::open());
            networks.connect(vm.clone()).unwrap();
            assert_eq!(Guest::new(&networks, &vm.vm).fetch(at(SERVER, 80)), HOST);
        }
    });
}

#[test]
fn ipv6_reaches_the_world_where_it_is_wanted() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp6(80).unwrap();
        let networks = world.networks();
        let mut vm = world.vm("a", Egress::open());
        vm.guest = world.with_ipv6();
        networks.connect(vm.clone()).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        let mut guest = Guest::new(&networks, &vm.vm);
        assert_eq!(guest.fetch(at("2001:db8::2", 80)), "2001:db8::1");
        assert_eq!(guest.fetch(at("192.0.2.2", 80)), "::ffff:192.0.2.1");
    });
}

#[test]
fn the_tap_belongs_to_whom_it_is_made_for() {
    on_own_host(Outside::Masquerade, |world| {
        let networks = world.networks();
        let mut vm = world.vm("a", Egress::open());
        networks.connect(vm.clone()).unwrap();
        let owner = || networks.inside(&vm.vm, || crate::world::ip("-d -o link show tap0")).unwrap();
        assert!(owner().contains("user 12345 group 12346"), "{}", owner());
        vm.tap.user = 54321;
        networks.connect(vm.clone()).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        let owner = networks.inside(&vm.vm, || crate::world::ip("-d -o link show tap0")).unwrap();
        assert!(owner.contains("user 54321 group 12346"), "{owner}");
    });
}

#[test]
fn a_tap_that_is_held_is_waited_for_and_then_named() {
    on_own_host(Outside::Masquerade, |world| {
        let networks = world.networks();
        let vm = world.vm("a", Egress::open());
        networks.connect(vm.clone()).unwrap();
        let guest = Guest::new(&networks, &vm.vm);
        let held = networks.await_free_tap(&vm.vm, Duration::ZERO);
        assert!(matches!(held, Err(NetworkError::TapHeld { .. })), "{held:?}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| networks.await_free_tap(&vm.vm, DEADLINE));
            drop(guest);
            waiting.join().unwrap().unwrap();
        });
    });
}
