//! Bridge networks under real guests: what they reach, what they do not, and that nothing of them is left.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use imp_runtime::spec::{
    BridgeWishes, Egress, IpVersions, NetworkMode, Otherwise, Outside, PublishedPort, VmSpec,
};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::{Runtime, VmId};
use imp_testkit::world::{
    self, HOST, HOST6, METADATA, PRIVATE_SERVER, PUBLIC_SERVER, SERVER, SERVER6, World, fetch,
};

use super::driver::on_driver;
use super::host::{Host, exec, outcome, reachable, running, start};
use super::owner::{Owner, Then};

/// Runs a test on a host of its own.
pub(crate) fn on_own_host(test: impl AsyncFnOnce(&World) + Send) {
    on_driver(async {
        let tested = world::on_own_host(|world| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(test(world));
        });
        tested.unwrap();
    });
}

pub(crate) fn bridged(mut spec: VmSpec, egress: Option<Egress>) -> VmSpec {
    spec.network = Some(NetworkMode::Bridge);
    spec.bridge.egress = egress;
    spec
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// What a server says to the guest: it has the time that a busy machine may need.
pub(crate) async fn reaches(runtime: &Runtime, id: &VmId, to: &str, port: u16) -> String {
    asked(runtime, id, to, port, 60).await
}

/// What a server says to the guest that it should not reach: nothing, for a short time.
async fn barred(runtime: &Runtime, id: &VmId, to: &str) -> String {
    asked(runtime, id, to, 80, 3).await
}

async fn asked(runtime: &Runtime, id: &VmId, to: &str, port: u16, seconds: u32) -> String {
    let ask = format!("timeout {} nc -w {seconds} {to} {port} </dev/null 2>/dev/null", seconds * 2);
    exec(runtime, id, &ask).await.0
}

/// What the guest's port says. Between two connections nobody listens in the guest for a moment.
fn said_at(address: &str, port: u16) -> String {
    let mut said = String::new();
    super::host::wait_until("the guest serves", || match fetch(at(address, port)) {
        Ok(text) => {
            said = text;
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{address}");
            false
        }
    });
    said
}

pub(crate) fn uplink(status: &VmStatus) -> String {
    status.network.uplink[0].to_string()
}

/// Devices, tables and namespaces that are ours.
pub(crate) fn nothing_of_ours() {
    assert!(!world::ip("-o link").unwrap().contains("imp"), "{}", world::ip("-o link").unwrap());
    assert_eq!(world::nft("list tables").unwrap(), "");
}

#[test]
fn two_guests_with_one_address_reach_the_world_and_are_told_apart_there() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host = Host::new();
        let mut config = host.config();
        config.bridge.outside = Outside::Routed;
        let runtime = Runtime::open(config).await.unwrap();
        let mut vms = Vec::new();
        for name in ["one", "other"] {
            vms.push(start(&runtime, bridged(host.spec(name, &["sleep", "1000"]), None)).await);
        }
        let mut seen = Vec::new();
        for id in &vms {
            let status = running(&runtime, id).await;
            assert_eq!(status.network.addresses, ["172.16.0.2/30"]);
            assert_eq!(reaches(&runtime, id, SERVER, 80).await, uplink(&status));
            seen.push(status);
        }
        assert_ne!(uplink(&seen[0]), uplink(&seen[1]));
        assert_ne!(seen[0].network.mac, seen[1].network.mac);
        // Not by the address that the host knows the other by, either.
        let (served, _) =
            tokio::join!(exec(&runtime, &vms[1], "echo hello | timeout 60 nc -l -p 80; true"), async {
                assert_eq!(barred(&runtime, &vms[0], &uplink(&seen[1])).await, "");
                exec(&runtime, &vms[1], "nc 127.0.0.1 80 </dev/null").await
            });
        assert_eq!(served.1, 0);
        for id in &vms {
            runtime.kill(id).await.unwrap();
        }
        nothing_of_ours();
        host.end(runtime).await;
    });
}

#[test]
fn a_guest_reaches_neither_metadata_nor_its_host_nor_what_is_denied() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host_service = TcpListener::bind("0.0.0.0:80").unwrap();
        host_service.set_nonblocking(true).unwrap();
        let host = Host::new();
        let runtime = host.open().await;
        let denied = vec!["10.0.0.0/8".parse().unwrap()];
        let egress = Egress { otherwise: Otherwise::Allow, refuse: denied, allow: Vec::new() };
        let id = start(&runtime, bridged(host.spec("guest", &["sleep", "1000"]), Some(egress))).await;
        running(&runtime, &id).await;
        assert_eq!(reaches(&runtime, &id, PUBLIC_SERVER, 80).await, HOST);
        let never = [METADATA, PRIVATE_SERVER, HOST, "172.16.0.1", "127.0.0.1"];
        let asked = never.map(|never| barred(&runtime, &id, never));
        assert_eq!(futures_util::future::join_all(asked).await.concat(), "", "one of {never:?}");
        // Also where a program puts any address in its packets.
        let routed = "ip route add 127.0.0.2 via 172.16.0.1; ip route add 192.0.2.1 via 172.16.0.1";
        exec(&runtime, &id, routed).await;
        assert_eq!(barred(&runtime, &id, HOST).await, "");
        assert!(host_service.accept().is_err(), "the guest came to its host");
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}

#[test]
fn a_guest_with_ipv6_reaches_the_world_and_is_reached_over_it() {
    on_own_host(async |world| {
        world.serve_tcp6(80).unwrap();
        let host = Host::new();
        let runtime = host.open().await;
        let mut spec = bridged(host.shell("guest", "while :; do echo hello | nc -l -p 8080; done"), None);
        spec.bridge = BridgeWishes { egress: None, versions: IpVersions::Both };
        spec.ports = vec![PublishedPort { host: "[::]:0".parse().unwrap(), guest: 8080.try_into().unwrap() }];
        let id = start(&runtime, spec).await;
        let status = running(&runtime, &id).await;
        assert_eq!(status.network.addresses.len(), 2, "{:?}", status.network);
        assert_eq!(reaches(&runtime, &id, SERVER6, 80).await, HOST6);
        let port = status.ports[0].host.port();
        assert_eq!(world.out_there(|| said_at(HOST6, port)).unwrap(), "hello\n");
        runtime.kill(&id).await.unwrap();
        nothing_of_ours();
        host.end(runtime).await;
    });
}

#[test]
fn a_network_outlives_its_owner_and_the_next_owner_answers_names_again() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        world.serve_names(PUBLIC_SERVER.parse::<std::net::Ipv4Addr>().unwrap().octets()).unwrap();
        let host = Host::new();
        let only = Egress::only(vec!["allowed.example:80".parse().unwrap()]);
        let mut spec =
            bridged(host.shell("guest", "while :; do echo hello | nc -l -p 8080; done"), Some(only));
        spec.ports =
            vec![PublishedPort { host: "0.0.0.0:0".parse().unwrap(), guest: 8080.try_into().unwrap() }];
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::LetRun)]);
        let before = owner.until(|status| status.state == State::Running);
        owner.kill();
        // Nobody owns it, and it is reached: from outside, from the host, and by its loopback.
        let port = before.ports[0].host.port();
        assert_eq!(world.out_there(|| said_at(HOST, port)).unwrap(), "hello\n");
        for address in [HOST, "127.0.0.1"] {
            assert_eq!(said_at(address, port), "hello\n", "{address}");
        }

        let runtime = host.open().await;
        let id = &before.id;
        reachable(&runtime, id).await;
        let after = runtime.get(id).unwrap();
        assert_eq!((&after.network, &after.ports), (&before.network, &before.ports));
        assert!(TcpListener::bind(("0.0.0.0", port)).is_err(), "the port is anybody's");
        // Closed until the name that is allowed has been asked for; other names lead nowhere.
        let closed =
            tokio::join!(barred(&runtime, id, PUBLIC_SERVER), barred(&runtime, id, "other.example"),);
        assert_eq!(closed, (String::new(), String::new()));
        assert_eq!(reaches(&runtime, id, "allowed.example", 80).await, HOST);
        assert_eq!(reaches(&runtime, id, PUBLIC_SERVER, 80).await, HOST);
        assert_eq!(said_at(HOST, port), "hello\n");
        runtime.kill(id).await.unwrap();
        assert!(TcpListener::bind(("0.0.0.0", port)).is_ok(), "the port is not free again");
        nothing_of_ours();
        host.end(runtime).await;
    });
}

/// The network namespace of a VM.
fn namespace(host: &Host, status: &VmStatus) -> PathBuf {
    host.path().join("run/networks").join(status.id.as_str())
}

#[test]
fn an_owner_killed_at_any_step_leaves_no_network_behind_the_next_one() {
    type Step = (&'static str, fn(&Host, &VmStatus) -> bool);
    let steps: [Step; 4] = [
        ("an address is leased", |_, _| true),
        ("there is a namespace", |host, status| {
            let (path, there) = (namespace(host, status), |path: &PathBuf| path.exists());
            super::host::wait_until("a namespace", || there(&path));
            true
        }),
        ("the VMM runs", |_, status| status.vmm_pid.is_some()),
        ("the guest answers", |_, status| status.agent.is_some()),
    ];
    on_own_host(async |_| {
        for (step, reached) in steps {
            let host = Host::new();
            let spec = bridged(host.spec("guest", &["sleep", "1000"]), None);
            let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::LetRun)]);
            let id = owner.until(|status| reached(&host, status)).id;
            owner.kill();
            let runtime = host.open().await;
            outcome(&runtime, &id).await;
            runtime.remove(&id).await.unwrap();
            nothing_of_ours();
            drop(runtime);
            host.assert_nothing_left(std::slice::from_ref(&id));
            println!("nothing is left after: {step}");
        }
    });
}

#[test]
fn foreign_rules_and_devices_are_as_they_were() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        world::nft("add table ip foreign").unwrap();
        world::nft("add chain ip foreign input { type filter hook input priority 0 ; policy accept ; }")
            .unwrap();
        world::nft("add rule ip foreign input tcp dport 22 accept").unwrap();
        let before = (world::nft("list ruleset").unwrap(), world::ip("-o link").unwrap());
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(&runtime, bridged(host.spec("guest", &["sleep", "1000"]), None)).await;
        running(&runtime, &id).await;
        assert!(world::nft("list ruleset").unwrap().contains(before.0.trim()));
        assert_eq!(reaches(&runtime, &id, SERVER, 80).await, HOST);
        runtime.kill(&id).await.unwrap();
        assert_eq!((world::nft("list ruleset").unwrap(), world::ip("-o link").unwrap()), before);
        host.end(runtime).await;
    });
}

#[test]
fn a_vm_that_was_never_started_gives_its_address_back() {
    on_own_host(async |_| {
        let host = Host::new();
        let runtime = host.open().await;
        let mut used = Vec::new();
        for name in ["one", "other"] {
            let id = runtime.create(bridged(host.spec(name, &["true"]), None)).await.unwrap();
            used.push(uplink(&runtime.get(&id).unwrap()));
            runtime.remove(&id).await.unwrap();
        }
        // The next one is another address: what is freed is used again as late as possible.
        assert_ne!(used[0], used[1]);
        let book = std::fs::read_to_string(host.data().join("networks.json")).unwrap();
        assert!(book.contains("\"leases\": {}"), "{book}");
        nothing_of_ours();
        host.end(runtime).await;
    });
}
