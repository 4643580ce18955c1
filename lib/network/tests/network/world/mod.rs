//! A host of its own for each test, with the site whose networks are under test, and guests that are a small TCP/IP stack
//! on a tap.

pub(crate) mod guest;

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::path::Path;

use imp_network::addresses::{Addresses, Pool};
use imp_network::egress::Egress;
use imp_network::spec::{Guest, Mac, Outside, Site, TapOwner, VmNetwork};
use imp_network::{Networks, host_routes};
use imp_sys::netns;
use imp_testkit::world;

pub(crate) use imp_testkit::world::{DEADLINE, HOST, HOST6, METADATA, OTHER_SERVER, SERVER, fetch};

pub(crate) const GUEST_MAC: Mac = Mac([0x06, 0x00, 0xac, 0x10, 0x00, 0x02]);

/// Inside it the calling thread's network is a host of the test's own.
pub(crate) struct World<'a> {
    pub(crate) site: Site,
    pub(crate) addresses: Addresses,
    pub(crate) directory: tempfile::TempDir,
    rest: &'a world::World,
}

/// Runs a test on a host of its own. Nothing of the machine's network is in reach of it.
pub(crate) fn on_own_host(outside: Outside, test: impl FnOnce(&mut World<'_>) + Send) {
    world::on_own_host(|rest| test(&mut World::new(outside, rest))).unwrap();
}

impl<'a> World<'a> {
    fn new(outside: Outside, rest: &'a world::World) -> Self {
        let pool = Pool::new("10.77.0.0/16".parse().unwrap(), Some("fd77::/64".parse().unwrap())).unwrap();
        let site = Site { name: "imp".parse().unwrap(), pool, outside, mtu: 1500, connections: 4096 };
        Self { site, addresses: Addresses::new(pool), directory: tempfile::tempdir().unwrap(), rest }
    }

    pub(crate) fn out_there<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.rest.out_there(work).unwrap()
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

    /// The same guest with IPv6 too.
    pub(crate) fn with_ipv6(&self) -> Guest {
        Guest::ipv4(GUEST_MAC, "172.16.0.2/30".parse().unwrap(), [172, 16, 0, 1].into())
            .and_then(|guest| guest.and_ipv6("fd00::2/64".parse().unwrap(), "fd00::1".parse().unwrap()))
            .unwrap()
    }
}

impl Deref for World<'_> {
    type Target = world::World;

    fn deref(&self) -> &world::World {
        self.rest
    }
}

impl Drop for World<'_> {
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

pub(crate) fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

/// Runs `ip` in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) -> String {
    world::ip(arguments).unwrap()
}

pub(crate) fn nft(arguments: &str) -> String {
    world::nft(arguments).unwrap()
}

/// All that is ours or could be: devices, addresses, routes, rules, files.
pub(crate) fn inventory(world: &World<'_>) -> BTreeMap<&'static str, String> {
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
