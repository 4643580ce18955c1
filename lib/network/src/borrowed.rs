//! A VM's tap and filters in a network namespace that somebody else keeps, a pod's: its own way out is the uplink.
//!
//! ```text
//!   the namespace of a pod
//!   ──────────────────────
//!   eth0 ── the pod's address ── translation, egress policy ── tap0 ── guest
//!           table inet SITE                        │
//!           table netdev SITE: anti-spoofing ──────┘
//! ```
//!
//! What else is in there stays as it is: no device is made but the tap, no route, and no packet is judged that neither
//! comes from the guest nor goes to it. Whatever governs the pod's own traffic governs the guest's, too.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::apply;
use crate::dns::NameSockets;
use crate::egress::{Egress, EgressError};
use crate::names::{DeviceName, SiteName, VmName};
use crate::networks::NetworkError;
use crate::nft;
use crate::observe;
use crate::opening::Admission;
use crate::plan::{self, Step};
use crate::spec::{Guest, TapOwner};

/// What is wanted in the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lodger {
    pub vm: VmName,
    /// As whom the VMM runs, which needs no capability to open the tap.
    pub tap: TapOwner,
    pub guest: Guest,
    pub egress: Egress,
    /// The namespace's own device that leads out.
    pub uplink: DeviceName,
    /// Connections that the VM may have open at once.
    pub connections: u32,
    pub mtu: u32,
}

/// A namespace with a VM in it.
#[derive(Debug)]
pub struct Borrowed {
    site: SiteName,
    namespace: OwnedFd,
}

impl Borrowed {
    /// The namespace, which must be there as long as it is used; it is not this that keeps it.
    pub fn new(site: SiteName, namespace: OwnedFd) -> Self {
        Self { site, namespace }
    }

    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// Makes tap and filters, or changes them to this.
    pub fn connect(&self, lodger: &Lodger) -> Result<(), NetworkError> {
        check(lodger)?;
        let steps = self.pending(lodger)?;
        self.apply(&lodger.vm, &steps)
    }

    /// What would be done now; nothing, if all is as it should be.
    pub fn pending(&self, lodger: &Lodger) -> Result<Vec<Step>, NetworkError> {
        self.inside(&lodger.vm, || {
            let facts = observe::facts(&self.site)?;
            let wanted = plan::lodging(&self.site, lodger, &facts);
            let seen = observe::seen_here(&self.site, &wanted)?;
            Ok(plan::lodging_steps(&lodger.vm, &wanted, &seen))
        })?
    }

    /// Removes tap and filters; success if there are none. The VMM has ended: a tap that is held lives on.
    pub fn disconnect(&self, vm: &VmName) -> Result<(), NetworkError> {
        let steps = self.inside(vm, || {
            let seen = observe::seen_here(&self.site, &plan::WantedSide::default())?;
            Ok::<_, NetworkError>(plan::lodging_removal(vm, &seen))
        })??;
        self.apply(vm, &steps)
    }

    /// Sockets for the VM's name server, bound to its gateway's addresses.
    pub fn name_sockets(&self, lodger: &Lodger) -> Result<NameSockets, NetworkError> {
        let mut gateways = vec![IpAddr::V4(lodger.guest.gateway().addr())];
        gateways.extend(lodger.guest.gateway6().map(|net| IpAddr::V6(net.addr())));
        self.inside(&lodger.vm, || NameSockets::bind(&gateways))?
            .map_err(|source| NetworkError::NameSockets { vm: lodger.vm.clone(), source })
    }

    /// The way for addresses of allowed names into the VM's filter.
    pub fn admission(&self, vm: &VmName) -> Result<Admission, NetworkError> {
        let socket =
            self.inside(vm, nft::open)?.map_err(|source| NetworkError::Admit { vm: vm.clone(), source })?;
        Ok(Admission::new(vm.clone(), plan::names_table(&self.site), socket))
    }

    fn apply(&self, vm: &VmName, steps: &[Step]) -> Result<(), NetworkError> {
        Ok(self.inside(vm, || apply::apply_here(steps))??)
    }

    fn inside<T: Send>(&self, vm: &VmName, work: impl FnOnce() -> T + Send) -> Result<T, NetworkError> {
        imp_sys::netns::inside(self.namespace.as_fd(), work)
            .map_err(|source| NetworkError::Enter { vm: vm.clone(), source })
    }
}

fn check(lodger: &Lodger) -> Result<(), NetworkError> {
    let wrong = |source: EgressError| NetworkError::Egress { vm: lodger.vm.clone(), source };
    lodger.egress.check().map_err(wrong)
}

/// Makes all that a VM needs in a namespace that is gone afterwards: whether this kernel and this process can.
pub fn trial() -> Result<(), NetworkError> {
    let vm: VmName = "trial".parse().expect("a name of five letters");
    let site: SiteName = "imp".parse().expect("a name of three letters");
    let enter = |source| NetworkError::Enter { vm: vm.clone(), source };
    let namespace = imp_sys::netns::create().map_err(enter)?;
    let guest = Guest::ipv4(
        crate::spec::Mac([0x06, 0, 0, 0, 0, 1]),
        ipnet::Ipv4Net::new_assert([172, 16, 0, 2].into(), 30),
        [172, 16, 0, 1].into(),
    );
    let guest = guest.expect("a guest and its gateway are two hosts of one network");
    let names = crate::egress::Allow::Name {
        name: "trial.example".parse().expect("a domain name"),
        ports: crate::egress::Ports::Any,
        scope: crate::egress::Scope::Public,
    };
    Borrowed::new(site, namespace).connect(&Lodger {
        vm,
        tap: TapOwner { user: 0, group: 0 },
        guest,
        egress: Egress::only(vec![names]),
        uplink: DeviceName::uplink(),
        connections: 1024,
        mtu: 1500,
    })
}
