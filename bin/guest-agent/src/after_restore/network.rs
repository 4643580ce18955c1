//! The machine's network: its device gets another address of its own, other addresses and routes, and forgets its neighbours.

use std::io;

use crate::configure::netlink::Netlink;
use crate::configure::network::{self, Interface};

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the guest has no network device")]
    NoDevice,
    #[error("{step}")]
    Kernel { step: &'static str, source: io::Error },
    #[error(transparent)]
    Configure(#[from] network::Error),
}

/// Down, a device forgets its neighbours and its routes.
pub(super) fn repair(wanted: &Interface) -> Result<(), Error> {
    let index = network::first_device().ok_or(Error::NoDevice)?;
    let kernel = |step| move |source| Error::Kernel { step, source };
    let mut netlink = Netlink::open().map_err(kernel("netlink"))?;
    netlink.take_down(index).map_err(kernel("the device cannot be taken down"))?;
    if let Some(mac) = wanted.octets() {
        netlink.set_mac(index, mac).map_err(kernel("the MAC address cannot be set"))?;
    }
    // Also those that are wanted: their connections and what was learned by them are another machine's.
    for address in netlink.addresses(index).map_err(kernel("the addresses cannot be read"))? {
        netlink.remove_address(index, &address).map_err(kernel("an old address cannot be removed"))?;
    }
    Ok(network::configure(wanted)?)
}
