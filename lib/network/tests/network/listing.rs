//! Our rules as `nft` reads them back from the kernel: what was encoded is what was meant.

use imp_network::egress::{Allow, Egress, PortRange, Ports, Scope};
use imp_network::spec::{Outside, Publish, PublishOn, Transport};

use crate::world::{nft, on_own_host};

#[test]
fn the_tables_are_what_nft_lists() {
    let port = Ports::Only([PortRange { transport: Transport::Tcp, first: 80, last: 89 }].into());
    let name = "*.example.com".parse().unwrap();
    let egress = Egress::only(vec![
        Allow::Network { to: "10.1.0.0/20".parse().unwrap(), ports: port },
        Allow::Name { name, ports: Ports::Any, scope: Scope::Public },
    ]);
    on_own_host(Outside::Masquerade, |world| {
        let networks = world.networks();
        let mut vm = world.vm("a", egress);
        let publish = |on, host_port| Publish { transport: Transport::Tcp, on, host_port, guest_port: 80 };
        vm.publish =
            vec![publish(PublishOn::AnyIpv4, 8080), publish(PublishOn::Address([127, 0, 0, 1].into()), 8081)];
        networks.connect(vm.clone()).unwrap();
        let host = without_comments(&nft("-n list table inet imp"));
        let filter = networks.inside(&vm.vm, || without_comments(&nft("-n list table inet imp"))).unwrap();
        let spoofing =
            networks.inside(&vm.vm, || without_comments(&nft("-n list table netdev imp"))).unwrap();
        let text = format!("host\n{host}\nVM\n{filter}\n{spoofing}");
        assert_eq!(text, include_str!("listing.txt"));
    });
}

/// The comments carry digests; the rules themselves are what is compared.
fn without_comments(listing: &str) -> String {
    let lines = listing.lines().map(|line| line.split(" comment \"").next().unwrap_or_default().trim_end());
    lines.collect::<Vec<_>>().join("\n")
}
