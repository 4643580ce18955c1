//! Reads what the plan needs to know of the host and of the VMs' namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::addresses::HostRoute;
use crate::names::{DeviceName, SiteName, VmName};
use crate::netlink::NetlinkError;
use crate::netlink::route::{FoundKind, FoundLink, Routing};
use crate::nft;
use crate::plan::{
    Device, DeviceKind, HostFacts, Links, Neighbour, Route, Scope, Seen, SeenNamespace, SeenSide, Wanted,
    WantedSide,
};
use crate::spec::Mac;

/// Where kernel settings are.
const SETTINGS: &str = "/proc/sys";

const ETHERNET_MTU: u32 = 1500;
/// The least that IPv6 works over.
const IPV6_MTU: u32 = 1280;
/// The most that a tap takes.
const LONGEST_MTU: u32 = 65_521;

#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    #[error("cannot list the network devices of {place}")]
    Links { place: String, source: NetlinkError },
    #[error(
        "cannot list the nftables of {place} (needs root, and the kernel module nf_tables: modprobe nf_tables)"
    )]
    Tables { place: String, source: NetlinkError },
    #[error("cannot read the setting {path}")]
    Setting { path: PathBuf, source: io::Error },
    #[error("cannot list the network namespaces in {directory}")]
    Namespaces { directory: PathBuf, source: io::Error },
    #[error("cannot enter the network namespace of VM {vm} (needs root)")]
    Enter { vm: VmName, source: io::Error },
}

/// What the host is like.
pub(crate) fn facts(site: &SiteName) -> Result<HostFacts, ObserveError> {
    let failed = |source| ObserveError::Links { place: "the host".to_owned(), source };
    let mut routing = Routing::open().map_err(failed)?;
    let links = routing.links().map_err(failed)?;
    let names: BTreeMap<u32, DeviceName> = names_of(&links);
    let prefix = site.prefix();
    let routes = routing.routes().map_err(failed)?;
    let outward = routes.iter().filter(|route| route.to.prefix_len() == 0).map(|route| route.device);
    let outward: BTreeSet<u32> = outward.collect();
    let mtus = links.iter().filter(|link| outward.contains(&link.index)).map(|link| link.mtu);
    let outward_mtu = mtus.min().unwrap_or(ETHERNET_MTU).clamp(IPV6_MTU, LONGEST_MTU);
    let routes = routes
        .into_iter()
        .filter_map(|route| Some(HostRoute { to: route.to, device: names.get(&route.device)?.clone() }))
        .filter(|route| !route.device.as_str().starts_with(&prefix))
        .collect();
    let ipv6 = Path::new(SETTINGS).join("net/ipv6").exists();
    let accepts = |device: &&DeviceName| {
        let path = Path::new(SETTINGS).join(format!("net/ipv6/conf/{device}/accept_ra"));
        // Already 2: told before, by us or by somebody else, and to stay so.
        fs::read_to_string(path).is_ok_and(|value| matches!(value.trim(), "1" | "2"))
    };
    let foreign = names.values().filter(|name| name.as_str() != "lo" && !name.as_str().starts_with(&prefix));
    let advertised = foreign.filter(accepts).cloned().collect();
    Ok(HostFacts { routes, advertised, ipv6, outward_mtu })
}

/// What there is of a VM in the calling thread's namespace, which is somebody else's.
pub(crate) fn seen_here(site: &SiteName, wanted: &WantedSide) -> Result<SeenSide, ObserveError> {
    let tap = DeviceName::tap();
    side(site, wanted, "the borrowed namespace", &|name| *name == tap)
}

/// What there is, of what is wanted and of what is left over.
pub(crate) fn seen(wanted: &Wanted, scope: &Scope, namespaces: &Path) -> Result<Seen, ObserveError> {
    let uplink = match scope {
        Scope::All => None,
        Scope::One(vm) => Some(wanted.site.name.uplink_of(vm)),
    };
    let prefix = wanted.site.name.prefix();
    let ours = |name: &DeviceName| match &uplink {
        Some(uplink) => name == uplink,
        None => name.as_str().starts_with(&prefix),
    };
    let host = side(&wanted.site.name, &wanted.host, "the host", &ours)?;
    let mut vms = BTreeMap::new();
    for vm in kept_namespaces(scope, namespaces)? {
        let nothing = WantedSide::default();
        let side_wanted = wanted.vms.get(&vm).unwrap_or(&nothing);
        let found = namespace(&wanted.site.name, &vm, side_wanted, &namespaces.join(vm.as_str()))?;
        vms.insert(vm, found);
    }
    Ok(Seen { host, vms })
}

/// The VMs in scope that have a file in the directory of namespaces.
fn kept_namespaces(scope: &Scope, directory: &Path) -> Result<Vec<VmName>, ObserveError> {
    let failed = |source| ObserveError::Namespaces { directory: directory.to_owned(), source };
    match scope {
        Scope::One(vm) => Ok(directory
            .join(vm.as_str())
            .try_exists()
            .map_err(failed)?
            .then(|| vm.clone())
            .into_iter()
            .collect()),
        Scope::All => {
            let mut found = Vec::new();
            for entry in fs::read_dir(directory).map_err(failed)? {
                let name = entry.map_err(failed)?.file_name();
                found.extend(name.to_str().and_then(|name| name.parse().ok()));
            }
            Ok(found)
        }
    }
}

fn namespace(
    site: &SiteName,
    vm: &VmName,
    wanted: &WantedSide,
    path: &Path,
) -> Result<SeenNamespace, ObserveError> {
    let failed = |source| ObserveError::Enter { vm: vm.clone(), source };
    if !imp_sys::netns::is_at(path).map_err(failed)? {
        return Ok(SeenNamespace::Stale);
    }
    let namespace = fs::File::open(path).map_err(failed)?;
    let everything = |name: &DeviceName| name.as_str() != "lo";
    let seen =
        imp_sys::netns::inside(namespace.as_fd(), || side(site, wanted, &format!("VM {vm}"), &everything));
    Ok(SeenNamespace::There(seen.map_err(failed)??))
}

/// What there is in the calling thread's namespace.
fn side(
    site: &SiteName,
    wanted: &WantedSide,
    place: &str,
    ours: &dyn Fn(&DeviceName) -> bool,
) -> Result<SeenSide, ObserveError> {
    let tables_failed = |source| ObserveError::Tables { place: place.to_owned(), source };
    let links = links(wanted, ours).map_err(|error| match error {
        LinksError::Netlink(source) => ObserveError::Links { place: place.to_owned(), source },
        LinksError::Setting(path, source) => ObserveError::Setting { path, source },
    })?;
    let mut socket = nft::open().map_err(tables_failed)?;
    let tables = nft::tables_named(&mut socket, site.table()).map_err(tables_failed)?;
    let mut elements = BTreeMap::new();
    for table in wanted.tables.iter().filter(|table| tables.get(&table.id) == Some(&table.shape())) {
        for set in table.sets.iter().filter(|set| !set.timed) {
            let found = nft::elements(&mut socket, &table.id, set.name).map_err(tables_failed)?;
            elements.insert(set.name.to_owned(), found);
        }
    }
    Ok(SeenSide { links, tables, elements })
}

enum LinksError {
    Netlink(NetlinkError),
    Setting(PathBuf, io::Error),
}

impl From<NetlinkError> for LinksError {
    fn from(error: NetlinkError) -> Self {
        Self::Netlink(error)
    }
}

fn links(wanted: &WantedSide, ours: &dyn Fn(&DeviceName) -> bool) -> Result<Links, LinksError> {
    let mut routing = Routing::open()?;
    let found = routing.links()?;
    let mut addresses = routing.addresses()?;
    let names: BTreeMap<u32, DeviceName> =
        names_of(&found).into_iter().filter(|(_, name)| ours(name)).collect();
    let mut devices = BTreeMap::new();
    for link in found {
        if let Some(name) = names.get(&link.index) {
            let addresses = addresses.remove(&link.index).unwrap_or_default().into_iter().collect();
            devices.insert(name.clone(), device(link, addresses));
        }
    }
    let routes = routing
        .routes()?
        .into_iter()
        .filter_map(|r| Some(Route { to: r.to, via: r.via?, device: names.get(&r.device)?.clone() }))
        .collect();
    let neighbours = routing
        .neighbours()?
        .into_iter()
        .filter_map(|(device, address, mac)| {
            Some(Neighbour { address, mac, device: names.get(&device)?.clone() })
        })
        .collect();
    let mut settings = BTreeMap::new();
    for setting in wanted.links.settings.keys() {
        let path = Path::new(SETTINGS).join(setting);
        match fs::read_to_string(&path) {
            Ok(value) => settings.insert(setting.clone(), value.trim().to_owned()),
            // Its device is not there yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(LinksError::Setting(path, error)),
        };
    }
    Ok(Links { devices, routes, neighbours, settings })
}

fn names_of(links: &[FoundLink]) -> BTreeMap<u32, DeviceName> {
    links.iter().filter_map(|link| Some((link.index, link.name.parse().ok()?))).collect()
}

fn device(link: FoundLink, addresses: BTreeSet<ipnet::IpNet>) -> Device {
    Device {
        kind: match link.kind {
            FoundKind::Tap(owner) => DeviceKind::Tap(owner),
            FoundKind::Pair => DeviceKind::Pair,
            FoundKind::Other => DeviceKind::Other,
        },
        mac: link.mac.unwrap_or(Mac([0; 6])),
        mtu: link.mtu,
        up: link.up,
        alias: link.alias,
        addresses,
    }
}
