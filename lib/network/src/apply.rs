//! Carries out the steps of a plan; chooses nothing.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::names::{DeviceName, TAP, UPLINK, VmName};
use crate::netlink::NetlinkError;
use crate::netlink::route::Routing;
use crate::nft;
use crate::plan::{Place, Step};

/// It takes some milliseconds.
const CARRIER_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("cannot make the network namespace {path} (needs root and CAP_SYS_ADMIN)")]
    MakeNamespace { path: PathBuf, source: io::Error },
    #[error("cannot remove the network namespace {path}")]
    RemoveNamespace { path: PathBuf, source: io::Error },
    #[error("cannot enter the network namespace {path}")]
    EnterNamespace { path: PathBuf, source: io::Error },
    #[error(
        "cannot make the tap device of VM {vm} (needs root, /dev/net/tun and the kernel module tun: modprobe tun)"
    )]
    MakeTap { vm: VmName, source: io::Error },
    #[error(
        "cannot make the uplink {device} of VM {vm} (needs root and the kernel module veth: modprobe veth)"
    )]
    MakeUplink { device: DeviceName, vm: VmName, source: NetlinkError },
    #[error("cannot {operation} the network device {device}")]
    Device { operation: &'static str, device: DeviceName, source: NetlinkError },
    #[error("the network device {device} is up, but passes no packets after {} s", CARRIER_PATIENCE.as_secs())]
    NoCarrier { device: DeviceName },
    #[error("the network device {device} is gone")]
    NoDevice { device: DeviceName },
    #[error("cannot set {setting} to {value}")]
    Set { setting: String, value: String, source: io::Error },
    #[error(
        "cannot {operation} the nftables table {table} (needs root and the kernel modules nf_tables, nft_ct, nft_nat, \
         nft_masq, nft_reject_inet, nft_fib_inet, nft_connlimit: modprobe them)"
    )]
    Table { operation: &'static str, table: String, source: NetlinkError },
}

/// Carries out the steps in order. Those that follow each other in one VM's namespace share a visit to it: entering costs
/// more than most steps.
pub(crate) fn apply(steps: &[Step], namespaces: &Path) -> Result<(), ApplyError> {
    for together in steps.chunk_by(|a, b| place_of(a) == place_of(b)) {
        let all = || together.iter().try_for_each(|step| carry_out(step, namespaces));
        match together.first().map(place_of) {
            Some(Place::Vm(vm)) => {
                let path = namespaces.join(vm.as_str());
                let namespace = open(&path)?;
                imp_sys::netns::inside(namespace.as_fd(), all)
                    .map_err(|source| ApplyError::EnterNamespace { path, source })??;
            }
            Some(Place::Host) | None => all()?,
        }
    }
    Ok(())
}

/// Carries out the steps in the calling thread's namespace, wherever they say that they belong.
pub(crate) fn apply_here(steps: &[Step]) -> Result<(), ApplyError> {
    steps.iter().try_for_each(|step| carry_out(step, Path::new("/")))
}

/// Where a step is carried out.
fn place_of(step: &Step) -> Place {
    match step {
        Step::MakeNamespace { .. } | Step::RemoveNamespace { .. } | Step::MakeUplink { .. } => Place::Host,
        Step::MakeTap { vm, .. } => Place::Vm(vm.clone()),
        Step::RemoveDevice { place, .. }
        | Step::SetDevice { place, .. }
        | Step::AwaitCarrier { place, .. }
        | Step::AddAddress { place, .. }
        | Step::RemoveAddress { place, .. }
        | Step::AddRoute { place, .. }
        | Step::AddNeighbour { place, .. }
        | Step::Set { place, .. }
        | Step::ReplaceTable { place, .. }
        | Step::RemoveTable { place, .. }
        | Step::RemoveElements { place, .. }
        | Step::AddElements { place, .. } => place.clone(),
    }
}

/// Carries out one step in the namespace that the calling thread is in.
fn carry_out(step: &Step, namespaces: &Path) -> Result<(), ApplyError> {
    let path_of = |vm: &VmName| namespaces.join(vm.as_str());
    match step {
        Step::MakeNamespace { vm } => imp_sys::netns::create_at(&path_of(vm))
            .map(drop)
            .map_err(|source| ApplyError::MakeNamespace { path: path_of(vm), source }),
        Step::RemoveNamespace { vm } => imp_sys::netns::remove_at(&path_of(vm))
            .map_err(|source| ApplyError::RemoveNamespace { path: path_of(vm), source }),
        Step::MakeTap { vm, owner } => imp_sys::tap::create(TAP, owner.user, owner.group)
            .map_err(|source| ApplyError::MakeTap { vm: vm.clone(), source }),
        Step::MakeUplink { vm, device } => {
            let far = open(&path_of(vm))?;
            Routing::open()
                .and_then(|mut routing| routing.make_pair(device.as_str(), UPLINK, far.as_fd()))
                .map_err(|source| ApplyError::MakeUplink { device: device.clone(), vm: vm.clone(), source })
        }
        Step::RemoveDevice { device, .. } => {
            with_routing("remove", device, |routing| routing.remove_device(device.as_str()))
        }
        Step::SetDevice { device, mac, mtu, alias, .. } => with_routing("set up", device, |routing| {
            routing.set_device(device.as_str(), *mac, *mtu, alias.as_deref())
        }),
        Step::AwaitCarrier { device, .. } => await_carrier(device),
        Step::AddAddress { device, address, .. } => {
            with_index("add an address to", device, |routing, index| routing.add_address(index, *address))
        }
        Step::RemoveAddress { device, address, .. } => {
            with_index("remove an address of", device, |routing, index| {
                routing.remove_address(index, *address)
            })
        }
        Step::AddRoute { route, .. } => with_index("route through", &route.device, |routing, index| {
            routing.set_route(route.to, route.via, index)
        }),
        Step::AddNeighbour { neighbour, .. } => {
            with_index("add a neighbour to", &neighbour.device, |routing, index| {
                routing.set_neighbour(index, neighbour.address, neighbour.mac)
            })
        }
        Step::Set { setting, value, .. } => fs::write(Path::new("/proc/sys").join(setting), value)
            .map_err(|source| ApplyError::Set { setting: setting.clone(), value: value.clone(), source }),
        Step::ReplaceTable { table, .. } => {
            with_tables("write", &table.id.name, |socket| nft::replace_table(socket, table))
        }
        Step::RemoveTable { table, .. } => {
            with_tables("remove", &table.name, |socket| nft::remove_table(socket, table))
        }
        Step::AddElements { table, set, elements, .. } => {
            with_tables("publish ports in", &table.name, |socket| {
                nft::add_elements(socket, table, set, elements.iter().map(|e| (e, None)))
            })
        }
        Step::RemoveElements { table, set, elements, .. } => {
            with_tables("take back ports in", &table.name, |socket| {
                nft::remove_elements(socket, table, set, elements)
            })
        }
    }
}

/// A VM's namespace. A plain file, which a crash may leave, is none.
pub(crate) fn open(path: &Path) -> Result<OwnedFd, ApplyError> {
    fs::File::open(path)
        .map(OwnedFd::from)
        .map_err(|source| ApplyError::EnterNamespace { path: path.to_owned(), source })
}

fn with_routing(
    operation: &'static str,
    device: &DeviceName,
    work: impl FnOnce(&mut Routing) -> Result<(), NetlinkError>,
) -> Result<(), ApplyError> {
    Routing::open().and_then(|mut routing| work(&mut routing)).map_err(|source| ApplyError::Device {
        operation,
        device: device.clone(),
        source,
    })
}

fn with_index(
    operation: &'static str,
    device: &DeviceName,
    work: impl FnOnce(&mut Routing, u32) -> Result<(), NetlinkError>,
) -> Result<(), ApplyError> {
    let failed = |source| ApplyError::Device { operation, device: device.clone(), source };
    let mut routing = Routing::open().map_err(failed)?;
    let index = routing.index_of(device.as_str()).map_err(failed)?;
    let index = index.ok_or_else(|| ApplyError::NoDevice { device: device.clone() })?;
    work(&mut routing, index).map_err(failed)
}

/// The kernel connects the ends of a pair on a thread of its own, and tells nobody who did not ask before.
fn await_carrier(device: &DeviceName) -> Result<(), ApplyError> {
    let failed = |source| ApplyError::Device { operation: "look at", device: device.clone(), source };
    let end = Instant::now() + CARRIER_PATIENCE;
    let mut routing = Routing::open().map_err(failed)?;
    while !routing.passes_packets(device.as_str()).map_err(failed)? {
        if Instant::now() > end {
            return Err(ApplyError::NoCarrier { device: device.clone() });
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn with_tables(
    operation: &'static str,
    table: &str,
    work: impl FnOnce(&mut crate::netlink::Socket) -> Result<(), NetlinkError>,
) -> Result<(), ApplyError> {
    nft::open().and_then(|mut socket| work(&mut socket)).map_err(|source| ApplyError::Table {
        operation,
        table: table.to_owned(),
        source,
    })
}
