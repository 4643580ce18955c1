//! Brings interfaces up and gives them addresses and routes.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use imp_protocol::guest::NetworkInterface;

use super::netlink::{Netlink, Prefix};

/// Time that a device has to appear: its driver is loaded while the agent already answers.
const APPEARS: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ParseError {
    #[error("`addresses` must be like 10.0.2.15/24 or fd00::15/64, not {0:?}")]
    Prefix(String),
    #[error("`gateways` must be IP addresses, one of each family at the most, not {0:?}")]
    Gateway(String),
    #[error("`mac` must be like 52:54:00:12:34:56, not {0:?}")]
    Mac(String),
}

/// The interface that the host wants.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    mac: Option<String>,
    addresses: Vec<Prefix>,
    gateways: Vec<IpAddr>,
    mtu: Option<u32>,
}

impl Interface {
    pub(crate) fn parse(wanted: NetworkInterface) -> Result<Self, ParseError> {
        let mac = wanted.mac.to_ascii_lowercase();
        let octets: Vec<&str> = mac.split(':').collect();
        let octet = |text: &&str| text.len() == 2 && u8::from_str_radix(text, 16).is_ok();
        let well_formed = octets.len() == 6 && octets.iter().all(octet);
        if !mac.is_empty() && !well_formed {
            return Err(ParseError::Mac(wanted.mac));
        }
        let mut gateways: Vec<IpAddr> = Vec::new();
        for text in wanted.gateways {
            match text.parse::<IpAddr>() {
                Ok(gateway) if !gateways.iter().any(|other| other.is_ipv4() == gateway.is_ipv4()) => {
                    gateways.push(gateway)
                }
                _ => return Err(ParseError::Gateway(text)),
            }
        }
        Ok(Self {
            mac: Some(mac).filter(|mac| !mac.is_empty()),
            addresses: wanted
                .addresses
                .into_iter()
                .map(|text| Prefix::parse(&text).ok_or(ParseError::Prefix(text)))
                .collect::<Result<_, _>>()?,
            gateways,
            mtu: Some(wanted.mtu).filter(|mtu| *mtu > 0),
        })
    }

    /// Of its MAC, where one is wanted.
    pub(crate) fn octets(&self) -> Option<[u8; 6]> {
        let octets: Vec<u8> =
            self.mac.as_ref()?.split(':').filter_map(|octet| u8::from_str_radix(octet, 16).ok()).collect();
        octets.try_into().ok()
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no interface {0} appeared")]
    NoInterface(String),
    #[error("{step}: {source}")]
    Kernel { step: &'static str, source: io::Error },
}

pub(crate) fn bring_up_loopback() -> Result<(), Error> {
    let index = index_of("lo").ok_or_else(|| Error::NoInterface("lo".into()))?;
    let mut netlink = Netlink::open().map_err(kernel("netlink"))?;
    netlink.bring_up(index, None).map_err(kernel("up"))
}

/// Addresses that are there already stay or are replaced; those that are not wanted any more are removed.
pub(crate) fn configure(wanted: &Interface) -> Result<(), Error> {
    let index = find(wanted.mac.as_deref())?;
    let mut netlink = Netlink::open().map_err(kernel("netlink"))?;
    // First down to what is wanted: a machine with two identities answers for both.
    for old in netlink.addresses(index).map_err(kernel("addresses"))? {
        if !wanted.addresses.contains(&old) && !old.is_link_local() {
            netlink.remove_address(index, &old).map_err(kernel("old address"))?;
        }
    }
    netlink.bring_up(index, wanted.mtu).map_err(kernel("up"))?;
    for address in &wanted.addresses {
        netlink.add_address(index, address).map_err(kernel("address"))?;
    }
    for gateway in &wanted.gateways {
        let on_link = !wanted.addresses.iter().any(|address| address.contains(gateway));
        netlink.set_default_route(index, gateway, on_link.into()).map_err(kernel("default route"))?;
    }
    Ok(())
}

fn kernel(step: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Kernel { step, source }
}

/// Index of the interface with this MAC, or of the first one that is not loopback.
fn find(mac: Option<&str>) -> Result<u32, Error> {
    let started = Instant::now();
    loop {
        let mut names: Vec<String> = fs::read_dir("/sys/class/net")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name != "lo")
            .collect();
        names.sort();
        let matches =
            |name: &&String| mac.is_none_or(|mac| attribute(name, "address").as_deref() == Some(mac));
        if let Some(index) = names.iter().find(matches).and_then(|name| index_of(name)) {
            return Ok(index);
        }
        if started.elapsed() > APPEARS {
            return Err(Error::NoInterface(mac.unwrap_or("besides loopback").to_owned()));
        }
        std::thread::sleep(LOOK);
    }
}

/// Index of the first interface that is a device, and not a bridge or the like of the guest's own.
pub(crate) fn first_device() -> Option<u32> {
    let entries = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let devices = entries.filter(|entry| entry.path().join("device").exists());
    devices.filter_map(|entry| index_of(entry.file_name().to_str()?)).min()
}

fn index_of(name: &str) -> Option<u32> {
    attribute(name, "ifindex")?.parse().ok()
}

fn attribute(name: &str, attribute: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/{attribute}")).ok()?;
    Some(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_address_is_refused() {
        let with = |change: fn(&mut NetworkInterface)| {
            let mut wanted = NetworkInterface::default();
            change(&mut wanted);
            Interface::parse(wanted)
        };
        for text in ["10.0.0.1", "10.0.0.1/33", "fd00::1/129", "x/8", "10.0.0.1/-1"] {
            let mut wanted = NetworkInterface::default();
            wanted.addresses.push(text.into());
            assert!(matches!(Interface::parse(wanted), Err(ParseError::Prefix(_))), "{text}");
        }
        assert!(matches!(with(|it| it.mac = "52:54:00:12:34".into()), Err(ParseError::Mac(_))));
        assert!(matches!(
            with(|it| it.gateways = vec!["10.0.0.1".into(), "10.0.0.2".into()]),
            Err(ParseError::Gateway(_))
        ));
        let both = with(|it| it.gateways = vec!["10.0.0.1".into(), "fe80::1".into()]).unwrap();
        assert_eq!(both.gateways.len(), 2);
    }
}
