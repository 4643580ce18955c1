//! A VM in a namespace that somebody else keeps, as a pod's is: the test's own host plays the pod.

use std::net::TcpListener;

use imp_network::egress::Egress;
use imp_network::names::{SiteName, TAP};
use imp_network::spec::{Outside, TapOwner};
use imp_network::{Borrowed, Lodger, trial};
use imp_sys::netns;
use imp_sys::tap::Frames;

use crate::world::guest::Guest;
use crate::world::{
    GUEST_MAC, HOST, HOST6, METADATA, SERVER, World, at, fetch, inventory, ip, nft, on_own_host,
};

fn lodger(world: &mut World<'_>, egress: Egress) -> Lodger {
    let vm = world.vm("a", egress);
    Lodger {
        vm: vm.vm,
        tap: TapOwner { user: 12345, group: 12346 },
        guest: vm.guest,
        egress: vm.egress,
        uplink: "out0".parse().unwrap(),
        connections: 1024,
        mtu: 1500,
    }
}

fn here() -> Borrowed {
    let site: SiteName = "imp".parse().unwrap();
    Borrowed::new(site, netns::current().unwrap())
}

fn guest() -> Guest {
    Guest::on(imp_sys::tap::open(TAP, Frames::Bare).unwrap(), GUEST_MAC)
}

#[test]
fn a_guest_in_a_pods_namespace_goes_out_under_the_pods_address_and_reaches_nothing_of_the_pod() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        // What the pod itself serves, and rules of its own.
        let service = TcpListener::bind(("0.0.0.0", 8080)).unwrap();
        service.set_nonblocking(true).unwrap();
        nft("add table inet foreign");
        nft("add chain inet foreign output { type filter hook output priority 0 ; policy accept ; }");
        std::fs::create_dir(world.directory.path().join("netns")).unwrap();
        let before = inventory(world);
        let (borrowed, lodger) = (here(), lodger(world, Egress::open()));
        borrowed.connect(&lodger).unwrap();
        assert_eq!(borrowed.pending(&lodger).unwrap(), []);
        let owner = ip("-d -o link show tap0");
        assert!(owner.contains("user 12345 group 12346"), "{owner}");

        let mut guest = guest();
        assert_eq!(guest.fetch(at(SERVER, 80)), HOST);
        guest.send(at(METADATA, 80), "credentials");
        guest.until_refused(at(METADATA, 80));
        for address in [HOST, "172.16.0.1"] {
            guest.send(at(address, 8080), "hello");
        }
        assert_eq!(guest.fetch(at(SERVER, 80)), HOST);
        assert!(service.accept().is_err());
        // The pod's own way is as it was.
        assert_eq!(fetch(at(SERVER, 80)).unwrap(), HOST);
        assert!(nft("list ruleset").contains("table inet foreign"));

        drop(guest);
        borrowed.disconnect(&lodger.vm).unwrap();
        borrowed.disconnect(&lodger.vm).unwrap();
        assert_eq!(inventory(world), before);
    });
}

#[test]
fn a_closed_policy_and_ipv6_hold_in_a_pods_namespace_too() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp6(80).unwrap();
        let only = Egress::only(vec!["2001:db8::/32".parse().unwrap()]);
        let mut lodger = lodger(world, only);
        lodger.guest = world.with_ipv6();
        let borrowed = here();
        borrowed.connect(&lodger).unwrap();
        assert_eq!(borrowed.pending(&lodger).unwrap(), []);
        let mut guest = guest();
        assert_eq!(guest.fetch(at("2001:db8::2", 80)), HOST6);
        guest.send(at(SERVER, 80), "hello");
        guest.until_refused(at(SERVER, 80));
        drop(guest);
        borrowed.disconnect(&lodger.vm).unwrap();
    });
}

#[test]
fn a_trial_says_that_it_works_here_and_changes_nothing() {
    on_own_host(Outside::Masquerade, |world| {
        std::fs::create_dir(world.directory.path().join("netns")).unwrap();
        let before = inventory(world);
        trial().unwrap();
        assert_eq!(inventory(world), before);
    });
}
