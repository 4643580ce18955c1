//! The network of a guest that goes on in another machine: what it knew of the one before is forgotten.

use imp_runtime::Runtime;
use imp_runtime::spec::Outside;
use imp_testkit::world::SERVER;

use super::bridge::{bridged, nothing_of_ours, on_own_host, reaches, uplink};
use super::driver::makes_none;
use super::fork::forked;
use super::host::{Host, exec};
use super::restore::{child, restored};
use super::template::{end, init, template};

/// A neighbour who is somebody else here, and an address that nobody has given to this guest.
const STALE: &str = "arp -s 172.16.0.1 02:00:00:00:00:99 && ip address add 10.99.0.1/32 dev eth0";
const KNOWN: &str = "cat /proc/net/arp; ip address show dev eth0";

#[test]
fn a_guest_forgets_neighbours_and_addresses_of_the_machine_before() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host = Host::on_disk();
        let mut config = host.config();
        config.bridge.outside = Outside::Routed;
        let runtime = Runtime::open(config).await.unwrap();
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let mut spec = template(bridged(host.spec("unused", &["sleep", "1000"]), None));
        spec.init = vec![init(STALE)];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let one = restored(&runtime, &made, child("one")).await;
        assert_eq!(reaches(&runtime, &one, SERVER, 80).await, uplink(&runtime.get(&one).unwrap()));
        // What it learns in its own life does not reach its children either.
        assert_eq!(exec(&runtime, &one, STALE).await.1, 0);
        let (known, _) = exec(&runtime, &one, KNOWN).await;
        assert!(known.contains("02:00:00:00:00:99") && known.contains("10.99.0.1"), "{known}");
        let two = forked(&runtime, &one, &["two"]).await.remove(0);
        assert_eq!(reaches(&runtime, &two, SERVER, 80).await, uplink(&runtime.get(&two).unwrap()));
        let (known, code) = exec(&runtime, &two, KNOWN).await;
        assert_eq!(code, 0, "{known}");
        assert!(!known.contains("02:00:00:00:00:99") && !known.contains("10.99.0.1"), "{known}");
        // The parent goes on as it was.
        let (known, _) = exec(&runtime, &one, KNOWN).await;
        assert!(known.contains("02:00:00:00:00:99"), "{known}");
        for id in [&one, &two] {
            runtime.kill(id).await.unwrap();
        }
        nothing_of_ours();
        end(&host, runtime).await;
    });
}
