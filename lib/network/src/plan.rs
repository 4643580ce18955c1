//! Decides what the networks of VMs consist of, and what is to be done about what is there: pure.
//!
//! ```text
//!   host's namespace                              the VM's namespace
//!   ───────────────                               ──────────────────
//!   out ── NAT, isolation, published ports ── uplink ═══ uplink0 ── NAT, egress policy ── tap0 ── guest
//!          table inet SITE                    leased addresses      table inet SITE       │
//!                                                                   table netdev SITE: anti-spoofing
//! ```
//!
//! The guest's own address may be the same in every VM: it is translated to the uplink's inside the VM's namespace.

mod diff;
mod host;
mod lodging;
mod vm;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

pub use diff::{Conflict, steps};
pub(crate) use lodging::{lodging, lodging_removal, lodging_steps};
pub(crate) use vm::{id as names_table, named_elements};

use crate::addresses::HostRoute;
use crate::names::{DeviceName, VmName};
use crate::nft::{Element, Table, TableId, TableShape};
use crate::spec::{Mac, Site, TapOwner, VmNetwork};

/// What the host is like, as far as plans depend on it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Routes of the main table that do not lead to an uplink of ours.
    pub routes: Vec<HostRoute>,
    /// Devices that take their IPv6 routes from advertisements, unless this host forwards IPv6.
    pub advertised: BTreeSet<DeviceName>,
    /// Whether the kernel has IPv6 at all.
    pub ipv6: bool,
    /// The smallest MTU of the devices that default routes lead to.
    pub outward_mtu: u32,
}

/// What there should be. Only what is ours is listed, and only that is ever changed or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub site: Site,
    pub host: WantedSide,
    pub vms: BTreeMap<VmName, WantedSide>,
    /// Each VM's end of its uplink on the host's side.
    pub uplinks: BTreeMap<VmName, DeviceName>,
}

/// What there should be in one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WantedSide {
    pub links: Links,
    pub tables: Vec<Table>,
}

/// What there is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    pub host: SeenSide,
    pub vms: BTreeMap<VmName, SeenNamespace>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeenNamespace {
    /// A file that no namespace is mounted on.
    Stale,
    There(SeenSide),
}

/// What there is in one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeenSide {
    pub links: Links,
    pub tables: BTreeMap<TableId, TableShape>,
    /// Of the sets of the table `inet SITE` whose elements are part of the plan.
    pub elements: BTreeMap<String, BTreeSet<Element>>,
}

/// Devices with what hangs on them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Links {
    pub devices: BTreeMap<DeviceName, Device>,
    pub routes: BTreeSet<Route>,
    pub neighbours: BTreeSet<Neighbour>,
    /// Files below /proc/sys and their content.
    pub settings: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub kind: DeviceKind,
    pub mac: Mac,
    pub mtu: u32,
    pub up: bool,
    pub alias: Option<String>,
    /// Without those that the kernel makes by itself.
    pub addresses: BTreeSet<IpNet>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Tap(TapOwner),
    /// One end of a pair.
    Pair,
    /// Something that we did not make.
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub to: IpNet,
    pub via: IpAddr,
    pub device: DeviceName,
}

/// A neighbour that is known for good, so that nobody is asked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Neighbour {
    pub address: IpAddr,
    pub mac: Mac,
    pub device: DeviceName,
}

/// In which namespace something is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Host,
    Vm(VmName),
}

/// Which VMs are looked at. The host's table is always looked at whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All that are wanted, and what is left of others.
    All,
    One(VmName),
}

/// One thing to do. Done in order; after a crash between any two a new plan goes on from there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    MakeNamespace {
        vm: VmName,
    },
    RemoveNamespace {
        vm: VmName,
    },
    MakeTap {
        vm: VmName,
        owner: TapOwner,
    },
    /// A pair of devices, one end in each namespace.
    MakeUplink {
        vm: VmName,
        device: DeviceName,
    },
    RemoveDevice {
        place: Place,
        device: DeviceName,
    },
    /// Name what a device is for, its MAC address and MTU, and take it up.
    SetDevice {
        place: Place,
        device: DeviceName,
        mac: Mac,
        mtu: u32,
        alias: Option<String>,
    },
    /// Wait until both ends of an uplink pass packets; before, they lose them.
    AwaitCarrier {
        place: Place,
        device: DeviceName,
    },
    AddAddress {
        place: Place,
        device: DeviceName,
        address: IpNet,
    },
    RemoveAddress {
        place: Place,
        device: DeviceName,
        address: IpNet,
    },
    AddRoute {
        place: Place,
        route: Route,
    },
    AddNeighbour {
        place: Place,
        neighbour: Neighbour,
    },
    Set {
        place: Place,
        setting: String,
        value: String,
    },
    ReplaceTable {
        place: Place,
        table: Table,
    },
    RemoveTable {
        place: Place,
        table: TableId,
    },
    RemoveElements {
        place: Place,
        table: TableId,
        set: String,
        elements: BTreeSet<Element>,
    },
    AddElements {
        place: Place,
        table: TableId,
        set: String,
        elements: BTreeSet<Element>,
    },
}

/// Of the host's ends of all uplinks.
pub(crate) const HOST_END_MAC: Mac = Mac([0x02, 0x69, 0x6d, 0x70, 0x00, 0x02]);
/// Of the VMs' ends of all uplinks.
pub(crate) const VM_END_MAC: Mac = Mac([0x02, 0x69, 0x6d, 0x70, 0x00, 0x03]);

/// What there should be for `vms`, which are all that the site has, as far as the scope goes.
pub fn wanted(site: &Site, vms: &BTreeMap<VmName, VmNetwork>, facts: &HostFacts, scope: &Scope) -> Wanted {
    let in_scope: BTreeMap<&VmName, &VmNetwork> = vms
        .iter()
        .filter(|(vm, _)| matches!(scope, Scope::All) || *scope == Scope::One((*vm).clone()))
        .collect();
    let mut host_links = host::common_links(vms, facts);
    let mut wanted = BTreeMap::new();
    let mut uplinks = BTreeMap::new();
    for (name, vm) in in_scope {
        host::add_uplink(&mut host_links, site, vm, facts);
        uplinks.insert(name.clone(), site.name.uplink_of(name));
        let tables = vec![vm::spoofing_table(&site.name, &vm.guest), vm::table(site, vm)];
        wanted.insert(name.clone(), WantedSide { links: vm::links(site, vm, facts), tables });
    }
    let tables = if vms.is_empty() { Vec::new() } else { vec![host::table(site, vms)] };
    Wanted { site: site.clone(), host: WantedSide { links: host_links, tables }, vms: wanted, uplinks }
}

#[cfg(test)]
mod tests;
