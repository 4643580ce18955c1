//! A host of its own for each test: a network namespace that plays the host, one that plays the rest of the world, and
//! guests that are a small TCP/IP stack on a tap.

pub(crate) mod guest;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use imp_network::addresses::{Addresses, Pool};
use imp_network::egress::Egress;
use imp_network::spec::{Guest, Mac, Outside, Site, TapOwner, VmNetwork};
use imp_network::{Networks, host_routes};
use imp_sys::netns;

/// For what must happen; never reached when it does.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) const HOST: &str = "192.0.2.1";
pub(crate) const SERVER: &str = "192.0.2.2";
/// Another address of the server.
pub(crate) const OTHER_SERVER: &str = "198.51.100.7";
pub(crate) const METADATA: &str = "169.254.169.254";
pub(crate) const GUEST_MAC: Mac = Mac([0x06, 0x00, 0xac, 0x10, 0x00, 0x02]);

/// Inside it the calling thread's network is a host of the test's own.
pub(crate) struct World {
    pub(crate) site: Site,
    pub(crate) addresses: Addresses,
    pub(crate) directory: tempfile::TempDir,
    outside: OwnedFd,
}

/// Runs a test on a host of its own. Nothing of the machine's network is in reach of it.
pub(crate) fn on_own_host(outside: Outside, test: impl FnOnce(&mut World) + Send) {
    let machine = fs::read_link("/proc/thread-self/ns/net").unwrap();
    let host = netns::create().expect("these tests make network namespaces: run them as root");
    netns::inside(host.as_fd(), || {
        assert_ne!(
            fs::read_link("/proc/thread-self/ns/net").unwrap(),
            machine,
            "still on the machine's own network"
        );
        test(&mut World::new(outside));
    })
    .unwrap();
}

impl World {
    fn new(outside: Outside) -> Self {
        let world = netns::create().unwrap();
        let far = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
        ip("link set lo up");
        ip("link add out0 type veth peer name in0");
        ip(&format!("link set in0 netns {far}"));
        ip(&format!("address add {HOST}/24 dev out0"));
        ip("-6 address add 2001:db8::1/64 dev out0 nodad");
        // No address that appears by itself, some time after the rest.
        ip("link set out0 addrgenmode none");
        ip("link set out0 up");
        netns::inside(world.as_fd(), || {
            ip("link set lo up");
            ip(&format!("address add {SERVER}/24 dev in0"));
            ip("-6 address add 2001:db8::2/64 dev in0 nodad");
            ip("link set in0 addrgenmode none");
            ip("link set in0 up");
            for address in [OTHER_SERVER, METADATA] {
                ip(&format!("address add {address}/32 dev lo"));
            }
            ip(&format!("route add 10.77.0.0/16 via {HOST}"));
        })
        .unwrap();
        await_carrier("out0");
        netns::inside(world.as_fd(), || await_carrier("in0")).unwrap();
        ip(&format!("route add default via {SERVER}"));
        ip("-6 route add default via 2001:db8::2");
        let pool = Pool::new("10.77.0.0/16".parse().unwrap(), Some("fd77::/64".parse().unwrap())).unwrap();
        let site = Site { name: "imp".parse().unwrap(), pool, outside, mtu: 1500 };
        Self {
            site,
            addresses: Addresses::new(pool),
            directory: tempfile::tempdir().unwrap(),
            outside: world,
        }
    }

    pub(crate) fn networks(&self) -> Networks {
        Networks::open(self.site.clone(), &self.directory.path().join("netns"), []).unwrap()
    }

    /// A VM whose guest has the address that the guests of all tests have.
    pub(crate) fn vm(&mut self, name: &str, egress: Egress) -> VmNetwork {
        let vm = name.parse().unwrap();
        let routes = host_routes(&self.site.name).unwrap();
        let guest = Guest::ipv4(GUEST_MAC, "172.16.0.2/30".parse().unwrap(), [172, 16, 0, 1].into()).unwrap();
        VmNetwork {
            link: self.addresses.lease(&vm, &routes).unwrap(),
            vm,
            tap: TapOwner { user: 12345, group: 12346 },
            guest,
            publish: Vec::new(),
            egress,
        }
    }

    pub(crate) fn out_there<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        netns::inside(self.outside.as_fd(), work).unwrap()
    }

    /// A server of the outside world, which answers each connection with the address it came from.
    pub(crate) fn serve_tcp(&self, port: u16) {
        let listener = self.out_there(|| TcpListener::bind(("0.0.0.0", port)).unwrap());
        serve(listener);
    }

    pub(crate) fn serve_tcp6(&self, port: u16) {
        let listener = self.out_there(|| TcpListener::bind(("::", port)).unwrap());
        serve(listener);
    }

    /// A server of the outside world that tells who sent it which datagram.
    pub(crate) fn collect_udp(&self, port: u16) -> Receiver<(SocketAddr, Vec<u8>)> {
        let socket = self.out_there(|| UdpSocket::bind(("0.0.0.0", port)).unwrap());
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(from.to_string().as_bytes(), from);
                if sender.send((from, buffer[..length].to_vec())).is_err() {
                    break;
                }
            }
        });
        receiver
    }
}

impl Drop for World {
    /// Namespaces outlive who made them, and a test may have failed.
    fn drop(&mut self) {
        remove_namespaces(&self.directory.path().join("netns"));
    }
}

/// Removes all namespaces that are kept in a directory.
pub(crate) fn remove_namespaces(directory: &Path) {
    for file in fs::read_dir(directory).into_iter().flatten().flatten() {
        let _ = netns::remove_at(&file.path());
    }
}

fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { break };
            let peer = stream.peer_addr().unwrap().ip();
            let _ = stream.write_all(peer.to_string().as_bytes());
        }
    });
}

/// Connects from the calling thread's namespace and reads to the end.
pub(crate) fn fetch(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

pub(crate) fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

/// Until then a device loses packets.
fn await_carrier(device: &str) {
    let end = Instant::now() + DEADLINE;
    while !ip(&format!("-o link show {device}")).contains("state UP") {
        assert!(Instant::now() < end, "{device} does not come up");
    }
}

/// Runs `ip` in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) -> String {
    run("ip", arguments, "iproute2")
}

pub(crate) fn nft(arguments: &str) -> String {
    run("nft", arguments, "nftables")
}

fn run(program: &str, arguments: &str, package: &str) -> String {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap_or_else(|error| {
        panic!("{program}: {error}; these tests look with it: apt-get install {package}")
    });
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// All that is ours or could be: devices, addresses, routes, rules, files.
pub(crate) fn inventory(world: &World) -> BTreeMap<&'static str, String> {
    let files = fs::read_dir(world.directory.path().join("netns")).unwrap();
    let files: Vec<_> = files.map(|entry| entry.unwrap().file_name()).collect();
    let directory = world.directory.path().to_str().unwrap().to_owned();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mounts: Vec<_> = mounts.lines().filter(|line| line.contains(&directory)).collect();
    BTreeMap::from([
        ("devices", ip("-o link").replace("state UNKNOWN", "state UP")),
        ("addresses", ip("-o address")),
        ("routes", ip("route show table all")),
        ("neighbours", ip("neighbour show nud permanent")),
        ("rules", nft("list ruleset")),
        ("files", format!("{files:?}")),
        ("mounts", format!("{mounts:?}")),
    ])
}
