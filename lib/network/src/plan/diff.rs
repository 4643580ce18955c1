//! The steps from what there is to what there should be.

use std::collections::{BTreeMap, BTreeSet};

use super::{DeviceKind, Links, Place, Seen, SeenNamespace, SeenSide, Step, Wanted, WantedSide};
use crate::names::{DeviceName, VmName};
use crate::nft::{Element, Set, Table};

/// Something that is not ours stands where something of ours must go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    #[error(
        "the network device {device}, which VM {vm} needs, belongs to {owner:?}: remove it, or give the VM another id"
    )]
    DeviceTaken { device: DeviceName, vm: VmName, owner: String },
}

/// What to do, in order: filters stand before the devices that they filter are up, and a port is published when all
/// behind it is there.
pub fn steps(wanted: &Wanted, seen: &Seen) -> Result<Vec<Step>, Conflict> {
    let mut steps = Vec::new();
    remove_leftovers(&mut steps, wanted, seen);
    tables(&mut steps, &Place::Host, &wanted.host, &seen.host);
    for (vm, side) in &wanted.vms {
        let Some(uplink) = wanted.uplinks.get(vm) else { continue };
        check_owner(vm, uplink, wanted, seen)?;
        let nothing = SeenSide::default();
        let there = match seen.vms.get(vm) {
            Some(SeenNamespace::There(there)) => there,
            Some(SeenNamespace::Stale) | None => {
                steps.push(Step::MakeNamespace { vm: vm.clone() });
                &nothing
            }
        };
        make_devices(&mut steps, vm, uplink, side, there, seen);
        let place = Place::Vm(vm.clone());
        tables(&mut steps, &place, side, there);
        fit(&mut steps, &place, &side.links, &there.links);
    }
    fit(&mut steps, &Place::Host, &wanted.host.links, &seen.host.links);
    await_carriers(&mut steps, wanted);
    elements(&mut steps, &wanted.host, &seen.host);
    Ok(steps)
}

/// What belongs to VMs that are not wanted, and the host's table when no VM is.
fn remove_leftovers(steps: &mut Vec<Step>, wanted: &Wanted, seen: &Seen) {
    for (device, found) in &seen.host.links.devices {
        let ours = found.alias.as_ref().is_none_or(|alias| wanted.site.name.vm_of(alias).is_some());
        if ours && !wanted.host.links.devices.contains_key(device) {
            steps.push(Step::RemoveDevice { place: Place::Host, device: device.clone() });
        }
    }
    for vm in seen.vms.keys().filter(|vm| !wanted.vms.contains_key(*vm)) {
        steps.push(Step::RemoveNamespace { vm: vm.clone() });
    }
    for table in seen.host.tables.keys() {
        if !wanted.host.tables.iter().any(|t| t.id == *table) {
            steps.push(Step::RemoveTable { place: Place::Host, table: table.clone() });
        }
    }
}

fn check_owner(vm: &VmName, uplink: &DeviceName, wanted: &Wanted, seen: &Seen) -> Result<(), Conflict> {
    let Some(found) = seen.host.links.devices.get(uplink) else { return Ok(()) };
    match &found.alias {
        Some(alias) if *alias != wanted.site.name.alias_of(vm) => {
            Err(Conflict::DeviceTaken { device: uplink.clone(), vm: vm.clone(), owner: alias.clone() })
        }
        // Without an alias it is the uplink itself, before a crash.
        Some(_) | None => Ok(()),
    }
}

fn make_devices(
    steps: &mut Vec<Step>,
    vm: &VmName,
    uplink: &DeviceName,
    side: &WantedSide,
    there: &SeenSide,
    seen: &Seen,
) {
    make_taps(steps, vm, side, there);
    let place = Place::Vm(vm.clone());
    let at_host = seen.host.links.devices.contains_key(uplink);
    let at_vm = there.links.devices.contains_key(&DeviceName::uplink());
    // A lone end belongs to a namespace that was replaced: its other end is out of reach, and goes with it.
    if at_host && !at_vm {
        steps.push(Step::RemoveDevice { place: Place::Host, device: uplink.clone() });
    }
    if at_vm && !at_host {
        steps.push(Step::RemoveDevice { place, device: DeviceName::uplink() });
    }
    if !(at_host && at_vm) {
        steps.push(Step::MakeUplink { vm: vm.clone(), device: uplink.clone() });
    }
}

pub(super) fn make_taps(steps: &mut Vec<Step>, vm: &VmName, side: &WantedSide, there: &SeenSide) {
    for (device, wanted) in &side.links.devices {
        let DeviceKind::Tap(owner) = wanted.kind else { continue };
        let found = there.links.devices.get(device).map(|d| d.kind);
        if found == Some(wanted.kind) {
            continue;
        }
        if found.is_some() {
            let place = Place::Vm(vm.clone());
            steps.push(Step::RemoveDevice { place, device: device.clone() });
        }
        steps.push(Step::MakeTap { vm: vm.clone(), owner });
    }
}

pub(super) fn tables(steps: &mut Vec<Step>, place: &Place, wanted: &WantedSide, seen: &SeenSide) {
    for table in &wanted.tables {
        // The tap's table goes with the tap.
        let tap_made =
            steps.iter().any(|s| matches!(s, Step::MakeTap { vm, .. } if *place == Place::Vm(vm.clone())));
        if tap_made || seen.tables.get(&table.id) != Some(&table.shape()) {
            steps.push(Step::ReplaceTable { place: place.clone(), table: table.clone() });
        }
    }
}

/// Settings, devices, addresses, neighbours and routes.
pub(super) fn fit(steps: &mut Vec<Step>, place: &Place, wanted: &Links, seen: &Links) {
    let remade: BTreeSet<DeviceName> = steps.iter().flat_map(|step| made_by(step, place)).collect();
    let about_remade =
        |setting: &str| remade.iter().any(|d| setting.split('/').any(|part| part == d.as_str()));
    for (setting, value) in in_order(&wanted.settings) {
        if about_remade(setting) || seen.settings.get(setting) != Some(value) {
            steps.push(Step::Set { place: place.clone(), setting: setting.clone(), value: value.clone() });
        }
    }
    for (device, want) in &wanted.devices {
        let found = seen.devices.get(device).filter(|_| !remade.contains(device));
        let addresses = found.map(|f| f.addresses.clone()).unwrap_or_default();
        for address in want.addresses.difference(&addresses) {
            steps.push(Step::AddAddress { place: place.clone(), device: device.clone(), address: *address });
        }
        for address in addresses.difference(&want.addresses) {
            steps.push(Step::RemoveAddress {
                place: place.clone(),
                device: device.clone(),
                address: *address,
            });
        }
        let same =
            |f: &&super::Device| (f.mac, f.mtu, f.up, &f.alias) == (want.mac, want.mtu, want.up, &want.alias);
        if found.filter(same).is_none() {
            steps.push(Step::SetDevice {
                place: place.clone(),
                device: device.clone(),
                mac: want.mac,
                mtu: want.mtu,
                alias: want.alias.clone(),
            });
        }
    }
    for neighbour in &wanted.neighbours {
        if remade.contains(&neighbour.device) || !seen.neighbours.contains(neighbour) {
            steps.push(Step::AddNeighbour { place: place.clone(), neighbour: neighbour.clone() });
        }
    }
    for route in &wanted.routes {
        if remade.contains(&route.device) || !seen.routes.contains(route) {
            steps.push(Step::AddRoute { place: place.clone(), route: route.clone() });
        }
    }
}

/// Of uplinks of which an end was touched.
fn await_carriers(steps: &mut Vec<Step>, wanted: &Wanted) {
    for (vm, uplink) in &wanted.uplinks {
        let ends = [(Place::Host, uplink.clone()), (Place::Vm(vm.clone()), DeviceName::uplink())];
        let touched = steps.iter().any(|step| match step {
            Step::SetDevice { place, device, .. } => ends.contains(&(place.clone(), device.clone())),
            _ => false,
        });
        if touched {
            steps.extend(ends.map(|(place, device)| Step::AwaitCarrier { place, device }));
        }
    }
}

/// Settings of one device before those of all: what turns routing on for all comes last.
fn in_order(settings: &BTreeMap<String, String>) -> impl Iterator<Item = (&String, &String)> {
    let for_all = |setting: &str| setting.contains("/all/") || setting.ends_with("/ip_forward");
    let (last, first): (Vec<_>, Vec<_>) = settings.iter().partition(|(setting, _)| for_all(setting));
    first.into_iter().chain(last)
}

fn made_by(step: &Step, place: &Place) -> Vec<DeviceName> {
    match (step, place) {
        (Step::MakeTap { vm, .. }, Place::Vm(at)) if vm == at => vec![DeviceName::tap()],
        (Step::MakeUplink { vm, .. }, Place::Vm(at)) if vm == at => vec![DeviceName::uplink()],
        (Step::MakeUplink { device, .. }, Place::Host) => vec![device.clone()],
        (_, Place::Host | Place::Vm(_)) => Vec::new(),
    }
}

/// Published ports that came or went, where the table itself stays.
fn elements(steps: &mut Vec<Step>, wanted: &WantedSide, seen: &SeenSide) {
    let replaced = |table: &Table| {
        steps
            .iter()
            .any(|s| matches!(s, Step::ReplaceTable { place: Place::Host, table: t } if t.id == table.id))
    };
    let kept: Vec<&Table> = wanted.tables.iter().filter(|table| !replaced(table)).collect();
    for table in kept {
        for set in table.sets.iter().filter(|set| !set.timed) {
            let nothing = BTreeSet::new();
            let found = seen.elements.get(set.name).unwrap_or(&nothing);
            let (gone, new) = difference(set, found);
            let (place, id, name) = (Place::Host, table.id.clone(), set.name.to_owned());
            if !gone.is_empty() {
                let (place, table, set) = (place.clone(), id.clone(), name.clone());
                steps.push(Step::RemoveElements { place, table, set, elements: gone });
            }
            if !new.is_empty() {
                steps.push(Step::AddElements { place, table: id, set: name, elements: new });
            }
        }
    }
}

fn difference(set: &Set, found: &BTreeSet<Element>) -> (BTreeSet<Element>, BTreeSet<Element>) {
    (found.difference(&set.elements).cloned().collect(), set.elements.difference(found).cloned().collect())
}
