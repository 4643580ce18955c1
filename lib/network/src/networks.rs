//! The networks of a site's VMs: looks, plans, and carries the plan out.
//!
//! Everything here blocks for some milliseconds; asynchronous callers use a thread for blocking work.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use imp_sys::tap::Frames;

use crate::addresses::HostRoute;
use crate::apply::{self, ApplyError};
use crate::dns::NameSockets;
use crate::egress::EgressError;
use crate::names::{SiteName, TAP, VmName};
use crate::netlink::NetlinkError;
use crate::nft;
use crate::observe::{self, ObserveError};
use crate::opening::Admission;
use crate::plan::{self, Conflict, Place, Scope, Step};
use crate::spec::{PublishOn, Site, VmNetwork};

/// All networks of one site. One process at a time has a site; which is the caller's to see to.
#[derive(Debug)]
pub struct Networks {
    site: Site,
    namespaces: PathBuf,
    /// Held while the host's table, which is common to all, is changed.
    vms: Mutex<BTreeMap<VmName, VmNetwork>>,
}

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("cannot make the directory {path} for network namespaces")]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot see what there is of VMs' networks")]
    Observe(#[from] ObserveError),
    #[error(transparent)]
    Conflict(#[from] Conflict),
    #[error("cannot change the networks of VMs")]
    Apply(#[from] ApplyError),
    #[error("the egress policy of VM {vm} cannot be kept")]
    Egress { vm: VmName, source: EgressError },
    #[error(
        "VM {vm} has IPv6, but its uplink has none: the address pool needs an IPv6 network, and the host's kernel IPv6"
    )]
    NoIpv6 { vm: VmName },
    #[error(
        "VM {vm} publishes a port over IPv6, which it does not have: give it IPv6, or publish the port over IPv4"
    )]
    PublishIpv6 { vm: VmName },
    #[error("VM {vm} publishes a port at ::1, from which nothing is routed: publish it at 127.0.0.1 or [::]")]
    PublishLoopback6 { vm: VmName },
    #[error("VM {vm} publishes {what}, which VM {other} has already")]
    PortTaken { vm: VmName, what: String, other: VmName },
    #[error("VM {vm} has no network here: connect it first")]
    Unknown { vm: VmName },
    #[error("cannot listen for the questions for names of VM {vm}")]
    NameSockets { vm: VmName, source: io::Error },
    #[error("cannot open addresses for VM {vm}")]
    Admit { vm: VmName, source: NetlinkError },
    #[error(
        "the tap of VM {vm} is still held after {} ms, by a VMM that was killed and has not ended or by another program: end \
         that and start the VM again", patience.as_millis()
    )]
    TapHeld { vm: VmName, patience: Duration },
    #[error("cannot open the tap of VM {vm}")]
    Tap { vm: VmName, source: io::Error },
    #[error("cannot enter the network namespace of VM {vm}")]
    Enter { vm: VmName, source: io::Error },
}

/// The routes of this host that are not ours: what leases of addresses keep clear of.
pub fn host_routes(site: &SiteName) -> Result<Vec<HostRoute>, NetworkError> {
    Ok(observe::facts(site)?.routes)
}

/// The most that leaves this host unfragmented where its default routes lead; without such a route, what Ethernet carries.
pub fn outward_mtu(site: &SiteName) -> Result<u32, NetworkError> {
    Ok(observe::facts(site)?.outward_mtu)
}

/// Chains of other firewalls on this host, as `family table chain`, that drop whatever they do not know: VMs reach
/// nothing outside until they accept what comes from and goes to devices that begin with the site's prefix. Ours to
/// tell, not to change.
pub fn obstacles(site: &SiteName) -> Result<Vec<String>, NetworkError> {
    let chains = nft::open().and_then(|mut socket| nft::dropping_forward_chains(&mut socket, site.table()));
    chains.map_err(|source| ObserveError::Tables { place: "the host".to_owned(), source }.into())
}

impl Networks {
    /// Takes over the site: the networks of `living` are made whole, and those of other VMs removed.
    /// `namespaces` is a directory of the site's own, where the VMs' network namespaces are mounted.
    pub fn open(
        site: Site,
        namespaces: &Path,
        living: impl IntoIterator<Item = VmNetwork>,
    ) -> Result<Self, NetworkError> {
        fs::create_dir_all(namespaces)
            .map_err(|source| NetworkError::Directory { path: namespaces.to_owned(), source })?;
        let vms = living.into_iter().map(|vm| (vm.vm.clone(), vm)).collect();
        let networks = Self { site, namespaces: namespaces.to_owned(), vms: Mutex::new(vms) };
        networks.converge(&networks.lock(), &Scope::All, Part::Whole)?;
        Ok(networks)
    }

    /// Makes the VM's network, or changes it to this. When it fails nothing of it is left. Several VMs are connected at
    /// once; calls about one VM come one after another.
    pub fn connect(&self, vm: VmNetwork) -> Result<(), NetworkError> {
        let scope = Scope::One(vm.vm.clone());
        let outcome = self.add(vm.clone(), &scope).and_then(|vms| self.converge(&vms, &scope, Part::Own));
        if outcome.is_err()
            && let Err(error) = self.disconnect(&vm.vm)
        {
            tracing::warn!(vm = %vm.vm, error = %error, "the network of a VM is left half made");
        }
        outcome
    }

    /// The common part comes first: it keeps VMs apart before there is anything to keep apart.
    fn add(&self, vm: VmNetwork, scope: &Scope) -> Result<BTreeMap<VmName, VmNetwork>, NetworkError> {
        let mut vms = self.lock();
        check(&vm, &vms)?;
        vms.insert(vm.vm.clone(), vm);
        self.converge(&vms, scope, Part::Common)?;
        Ok(vms.clone())
    }

    /// Removes all of the VM's network; success if it has none. Its VMM has ended: a tap that is held lives on.
    pub fn disconnect(&self, vm: &VmName) -> Result<(), NetworkError> {
        let scope = Scope::One(vm.clone());
        let without = {
            let mut vms = self.lock();
            vms.remove(vm);
            vms.clone()
        };
        self.converge(&without, &scope, Part::Own)?;
        self.converge(&self.lock(), &scope, Part::Common)
    }

    /// Where the VM's network namespace is mounted: for a VMM to enter, or a jailer.
    pub fn namespace_of(&self, vm: &VmName) -> PathBuf {
        self.namespaces.join(vm.as_str())
    }

    /// Waits until nobody holds the VM's tap any more: a VMM that was killed may take a moment to let go of it.
    pub fn await_free_tap(&self, vm: &VmName, patience: Duration) -> Result<(), NetworkError> {
        let held = |error: &io::Error| error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error());
        let end = Instant::now() + patience;
        self.inside(vm, || {
            loop {
                match imp_sys::tap::open(TAP, Frames::WithVirtioHeader) {
                    Ok(_) => return Ok(()),
                    Err(error) if held(&error) && Instant::now() < end => {
                        thread::sleep(Duration::from_millis(2));
                    }
                    Err(error) if held(&error) => {
                        return Err(NetworkError::TapHeld { vm: vm.clone(), patience });
                    }
                    Err(source) => return Err(NetworkError::Tap { vm: vm.clone(), source }),
                }
            }
        })?
    }

    /// Does `work` inside the VM's network namespace, on a thread of its own.
    pub fn inside<T: Send>(&self, vm: &VmName, work: impl FnOnce() -> T + Send) -> Result<T, NetworkError> {
        let namespace = apply::open(&self.namespace_of(vm))?;
        imp_sys::netns::inside(namespace.as_fd(), work)
            .map_err(|source| NetworkError::Enter { vm: vm.clone(), source })
    }

    /// The way for addresses of allowed names into the VM's filter.
    pub fn admission(&self, vm: &VmName) -> Result<Admission, NetworkError> {
        let socket =
            self.inside(vm, nft::open)?.map_err(|source| NetworkError::Admit { vm: vm.clone(), source })?;
        Ok(Admission::new(vm.clone(), plan::names_table(&self.site.name), socket))
    }

    /// Sockets for the VM's name server, bound to its gateway's addresses.
    pub fn name_sockets(&self, vm: &VmName) -> Result<NameSockets, NetworkError> {
        let guest = self.lock().get(vm).map(|known| known.guest.clone());
        let guest = guest.ok_or_else(|| NetworkError::Unknown { vm: vm.clone() })?;
        let mut gateways = vec![IpAddr::V4(guest.gateway().addr())];
        gateways.extend(guest.gateway6().map(|net| IpAddr::V6(net.addr())));
        self.inside(vm, || NameSockets::bind(&gateways))?
            .map_err(|source| NetworkError::NameSockets { vm: vm.clone(), source })
    }

    /// What would be done now; nothing, if all is as it should be.
    pub fn pending(&self) -> Result<Vec<Step>, NetworkError> {
        self.plan(&self.lock(), &Scope::All)
    }

    fn converge(
        &self,
        vms: &BTreeMap<VmName, VmNetwork>,
        scope: &Scope,
        part: Part,
    ) -> Result<(), NetworkError> {
        let mut steps = self.plan(vms, scope)?;
        steps.retain(|step| match part {
            Part::Whole => true,
            Part::Common => is_common(step),
            Part::Own => !is_common(step),
        });
        tracing::debug!(?scope, steps = steps.len(), "changing networks");
        Ok(apply::apply(&steps, &self.namespaces)?)
    }

    fn plan(&self, vms: &BTreeMap<VmName, VmNetwork>, scope: &Scope) -> Result<Vec<Step>, NetworkError> {
        let facts = observe::facts(&self.site.name)?;
        let wanted = plan::wanted(&self.site, vms, &facts, scope);
        let seen = observe::seen(&wanted, scope, &self.namespaces)?;
        Ok(plan::steps(&wanted, &seen)?)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<VmName, VmNetwork>> {
        // The map is changed by single inserts and removals: whoever panicked left it whole.
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which steps of a plan are carried out.
#[derive(Debug, Clone, Copy)]
enum Part {
    Whole,
    /// What all VMs share, one change at a time.
    Common,
    /// What a VM has for itself.
    Own,
}

/// Whether a step is about the host's table.
fn is_common(step: &Step) -> bool {
    match step {
        Step::ReplaceTable { place, .. }
        | Step::RemoveTable { place, .. }
        | Step::AddElements { place, .. }
        | Step::RemoveElements { place, .. } => *place == Place::Host,
        Step::MakeNamespace { .. }
        | Step::RemoveNamespace { .. }
        | Step::MakeTap { .. }
        | Step::MakeUplink { .. }
        | Step::RemoveDevice { .. }
        | Step::SetDevice { .. }
        | Step::AwaitCarrier { .. }
        | Step::AddAddress { .. }
        | Step::RemoveAddress { .. }
        | Step::AddRoute { .. }
        | Step::AddNeighbour { .. }
        | Step::Set { .. } => false,
    }
}

/// What one VM's network says that another's rules out.
fn check(vm: &VmNetwork, others: &BTreeMap<VmName, VmNetwork>) -> Result<(), NetworkError> {
    vm.egress.check().map_err(|source| NetworkError::Egress { vm: vm.vm.clone(), source })?;
    if vm.guest.address6().is_some() && vm.link.ipv6.is_none() {
        return Err(NetworkError::NoIpv6 { vm: vm.vm.clone() });
    }
    for port in vm.publish.iter().filter(|port| port.is_ipv6()) {
        if vm.guest.address6().is_none() {
            return Err(NetworkError::PublishIpv6 { vm: vm.vm.clone() });
        }
        if port.on == PublishOn::Address(Ipv6Addr::LOCALHOST.into()) {
            return Err(NetworkError::PublishLoopback6 { vm: vm.vm.clone() });
        }
    }
    for other in others.values().filter(|other| other.vm != vm.vm) {
        for port in &vm.publish {
            if other.publish.iter().any(|taken| taken.collides_with(port)) {
                return Err(NetworkError::PortTaken {
                    vm: vm.vm.clone(),
                    what: format!("{} port {}", port.transport, port.host_port),
                    other: other.vm.clone(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use imp_sys::netns;

    use super::*;
    use crate::addresses::{Addresses, Pool};
    use crate::egress::Egress;
    use crate::spec::{Guest, Mac, Outside, Publish, PublishOn, TapOwner, Transport};

    fn site() -> Site {
        let pool = Pool::new("10.77.0.0/16".parse().unwrap(), None).unwrap();
        Site {
            name: "imp".parse().unwrap(),
            pool,
            outside: Outside::Masquerade,
            mtu: 1500,
            connections: 4096,
        }
    }

    fn vm() -> VmNetwork {
        let vm = "a".parse().unwrap();
        let mac = Mac([6, 0, 0, 0, 0, 2]);
        VmNetwork {
            link: Addresses::new(site().pool).lease(&vm, &[]).unwrap(),
            vm,
            tap: TapOwner { user: 1, group: 1 },
            guest: Guest::ipv4(mac, "172.16.0.2/30".parse().unwrap(), [172, 16, 0, 1].into()).unwrap(),
            publish: vec![Publish {
                transport: Transport::Tcp,
                on: PublishOn::AnyIpv4,
                host_port: 8080,
                guest_port: 80,
            }],
            egress: Egress::open(),
        }
    }

    fn links() -> Vec<String> {
        let mut routing = crate::netlink::route::Routing::open().unwrap();
        routing.links().unwrap().into_iter().map(|link| link.name).collect()
    }

    /// Carries out the first steps of making the network in a namespace of its own, which plays the host.
    fn broken_off_after(steps: usize, test: impl FnOnce(&Path) + Send) -> usize {
        let host = netns::create().expect("this test makes network namespaces: run it as root");
        let directory = tempfile::tempdir().unwrap();
        netns::inside(host.as_fd(), || {
            assert_eq!(links(), ["lo"], "not a namespace of its own");
            let networks = Networks::open(site(), directory.path(), []).unwrap();
            let plan = networks.plan(&[(vm().vm, vm())].into(), &Scope::All).unwrap();
            apply::apply(plan.get(..steps).unwrap(), directory.path()).unwrap();
            test(directory.path());
            for file in fs::read_dir(directory.path()).unwrap() {
                netns::remove_at(&file.unwrap().path()).unwrap();
            }
            plan.len()
        })
        .unwrap()
    }

    #[test]
    fn a_crash_after_any_step_ends_in_a_whole_network_or_in_none() {
        let all = broken_off_after(0, |_| {});
        for steps in 0..=all {
            broken_off_after(steps, |directory| {
                let networks = Networks::open(site(), directory, [vm()]).unwrap();
                assert_eq!(networks.pending().unwrap(), [], "after {steps} steps");
            });
            broken_off_after(steps, |directory| {
                Networks::open(site(), directory, []).unwrap();
                assert_eq!(links(), ["lo"], "after {steps} steps");
                assert_eq!(fs::read_dir(directory).unwrap().count(), 0, "after {steps} steps");
                assert!(
                    nft::tables_named(&mut nft::open().unwrap(), "imp").unwrap().is_empty(),
                    "after {steps} steps"
                );
            });
        }
    }

    #[test]
    fn a_namespace_file_without_a_namespace_is_used_or_removed() {
        broken_off_after(0, |directory| {
            fs::write(directory.join("a"), "").unwrap();
            let networks = Networks::open(site(), directory, [vm()]).unwrap();
            assert_eq!(networks.pending().unwrap(), []);
        });
        broken_off_after(0, |directory| {
            fs::write(directory.join("a"), "").unwrap();
            Networks::open(site(), directory, []).unwrap();
            assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
        });
    }

    #[test]
    fn a_network_that_cannot_be_made_leaves_nothing() {
        broken_off_after(0, |directory| {
            let networks = Networks::open(site(), directory, []).unwrap();
            // Above what a device takes: the last steps fail.
            let networks = Networks { site: Site { mtu: 70_000, ..site() }, ..networks };
            let failed = networks.connect(vm());
            assert!(matches!(failed, Err(NetworkError::Apply(ApplyError::Device { .. }))), "{failed:?}");
            assert_eq!(links(), ["lo"]);
            assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
        });
    }
}
