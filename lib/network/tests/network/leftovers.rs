//! Nothing stays behind: not after an orderly end, not after a crash.

use std::os::fd::AsFd;

use imp_network::egress::Egress;
use imp_network::spec::{Outside, Publish, PublishOn, Transport, VmNetwork};
use imp_network::{Networks, obstacles};
use imp_sys::netns;

use crate::world::guest::Guest;
use crate::world::{HOST, SERVER, at, inventory, ip, nft, on_own_host};

#[test]
fn a_made_network_needs_nothing_more_and_goes_without_a_trace() {
    on_own_host(Outside::Masquerade, |world| {
        nft("add table inet foreign");
        nft("add chain inet foreign forward { type filter hook forward priority 10 ; policy drop ; }");
        nft("add rule inet foreign forward ip daddr 192.0.2.99 counter drop");
        let networks = world.networks();
        let before = inventory(world);
        let foreign = nft("list table inet foreign");
        let mut vm = world.vm("a", Egress::open());
        vm.publish = vec![Publish {
            transport: Transport::Tcp,
            on: PublishOn::AnyIpv4,
            host_port: 8080,
            guest_port: 80,
        }];
        networks.connect(vm.clone()).unwrap();
        networks.connect(world.vm("b", Egress::open())).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        assert_eq!(nft("list table inet foreign"), foreign);
        assert_eq!(obstacles(&world.site.name).unwrap(), ["inet foreign forward"]);
        networks.disconnect(&vm.vm).unwrap();
        networks.disconnect(&vm.vm).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        networks.disconnect(&"b".parse().unwrap()).unwrap();
        assert_eq!(inventory(world), before);
    });
}

#[test]
fn what_dead_vms_left_is_removed_and_the_living_keep_their_connections() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let networks = world.networks();
        let (living, dead) = (world.vm("living", Egress::open()), world.vm("dead", Egress::open()));
        networks.connect(living.clone()).unwrap();
        networks.connect(dead.clone()).unwrap();
        let mut guest = Guest::new(&networks, &living.vm);
        let directory = networks.namespace_of(&living.vm).parent().unwrap().to_owned();
        // The owner is killed; its successor knows one of the two.
        drop(networks);
        let networks = Networks::open(world.site.clone(), &directory, [living.clone()]).unwrap();
        assert_eq!(networks.pending().unwrap(), []);
        assert!(!networks.namespace_of(&dead.vm).exists());
        assert_eq!(ip("-o link").matches(": imp-").count(), 1);
        assert_eq!(guest.fetch(at(SERVER, 80)), HOST);
    });
}

#[test]
fn another_sites_devices_and_rules_are_left_alone() {
    on_own_host(Outside::Masquerade, |world| {
        let mut site = world.site.clone();
        site.name = "other".parse().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let others = Networks::open(site, directory.path(), []).unwrap();
        let vm = world.vm("a", Egress::open());
        others.connect(vm.clone()).unwrap();
        let networks = world.networks();
        let before = inventory(world);
        let mine = world.vm("b", Egress::open());
        networks.connect(mine.clone()).unwrap();
        networks.disconnect(&mine.vm).unwrap();
        drop(networks);
        drop(world.networks());
        assert_eq!(inventory(world)["devices"], before["devices"]);
        assert_eq!(inventory(world)["rules"], before["rules"]);
        others.disconnect(&vm.vm).unwrap();
    });
}

#[test]
fn what_somebody_broke_is_mended() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let networks = world.networks();
        let vm = world.vm("a", Egress::open());
        networks.connect(vm.clone()).unwrap();
        let inside = |work: fn()| networks.inside(&vm.vm, work).unwrap();
        let uplink = world.site.name.uplink_of(&vm.vm);
        let breakages: [&dyn Fn(); 8] = [
            &|| drop(nft("delete table inet imp")),
            &|| drop(nft("flush chain inet imp forward")),
            &|| drop(nft("add rule inet imp forward accept")),
            &|| drop(ip(&format!("link delete {uplink}"))),
            &|| drop(ip(&format!("link set {uplink} down"))),
            &|| inside(|| drop(nft("delete table netdev imp"))),
            &|| inside(|| drop(ip("route delete default"))),
            &|| inside(|| drop(ip("link delete tap0"))),
        ];
        for (number, breakage) in breakages.iter().enumerate() {
            breakage();
            assert_ne!(networks.pending().unwrap(), [], "breakage {number} was not seen");
            networks.connect(vm.clone()).unwrap();
            assert_eq!(networks.pending().unwrap(), [], "breakage {number} was not mended");
        }
        assert_eq!(Guest::new(&networks, &vm.vm).fetch(at(SERVER, 80)), HOST);
    });
}

#[test]
fn many_vms_at_once_come_and_go() {
    on_own_host(Outside::Masquerade, |world| {
        world.serve_tcp(80).unwrap();
        let networks = world.networks();
        let before = inventory(world);
        let vms: Vec<_> = (0..8u16)
            .map(|n| {
                let mut vm = world.vm(&format!("vm{n}"), Egress::open());
                let on = PublishOn::AnyIpv4;
                vm.publish =
                    vec![Publish { transport: Transport::Tcp, on, host_port: 8080 + n, guest_port: 80 }];
                vm
            })
            .collect();
        let host = netns::current().unwrap();
        let at_once = |work: &(dyn Fn(&VmNetwork) + Sync)| {
            std::thread::scope(|scope| {
                for vm in &vms {
                    let host = host.as_fd();
                    scope.spawn(move || netns::inside(host, || work(vm)).unwrap());
                }
            });
        };
        at_once(&|vm| {
            networks.connect(vm.clone()).unwrap();
            assert_eq!(Guest::new(&networks, &vm.vm).fetch(at(SERVER, 80)), HOST);
        });
        assert_eq!(networks.pending().unwrap(), []);
        at_once(&|vm| networks.disconnect(&vm.vm).unwrap());
        assert_eq!(inventory(world), before);
    });
}
