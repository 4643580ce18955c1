//! Opens the addresses of allowed names in a VM's filter, each for as long as its name may mean it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::egress::Ports;
use crate::names::VmName;
use crate::netlink::Socket;
use crate::networks::NetworkError;
use crate::nft::{self, Element, TableId};
use crate::plan;

/// Opens addresses for one VM for a while.
pub struct Admission {
    vm: VmName,
    table: TableId,
    socket: Mutex<Socket>,
}

/// An address that a name led to, and what it opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    pub address: IpAddr,
    pub ports: Ports,
    pub time: Duration,
}

impl Admission {
    pub(crate) fn new(vm: VmName, table: TableId, socket: Socket) -> Self {
        Self { vm, table, socket: Mutex::new(socket) }
    }

    /// When this returns, packets to these addresses pass.
    pub fn open(&self, openings: &[Opening]) -> Result<(), NetworkError> {
        let mut by_set: BTreeMap<&'static str, Vec<(Element, Duration)>> = BTreeMap::new();
        for opening in openings {
            for (set, element) in plan::named_elements(opening.address, &opening.ports) {
                by_set.entry(set).or_default().push((element, opening.time));
            }
        }
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        for (set, elements) in by_set {
            let timed = elements.iter().map(|(element, time)| (element, Some(*time)));
            nft::add_elements(&mut socket, &self.table, set, timed)
                .map_err(|source| NetworkError::Admit { vm: self.vm.clone(), source })?;
        }
        Ok(())
    }
}
