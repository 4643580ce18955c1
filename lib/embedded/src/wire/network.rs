//! The network that a VM is to have, as the owner's socket carries it.

use imp_protocol::runtime as wire;
use imp_runtime::spec::{
    Allow, BridgeWishes, Egress, IpVersions, NetworkMode, Otherwise, PortRange, Ports, Scope, Transport,
};

use super::Error;

pub(super) fn mode_to_wire(mode: Option<NetworkMode>) -> wire::Network {
    match mode {
        None => wire::Network::Default,
        Some(NetworkMode::User) => wire::Network::User,
        Some(NetworkMode::None) => wire::Network::None,
        Some(NetworkMode::Bridge) => wire::Network::Bridge,
    }
}

pub(super) fn mode_from_wire(mode: wire::Network) -> Option<NetworkMode> {
    match mode {
        wire::Network::Default => None,
        wire::Network::User => Some(NetworkMode::User),
        wire::Network::None => Some(NetworkMode::None),
        wire::Network::Bridge => Some(NetworkMode::Bridge),
    }
}

pub(super) fn egress_to_wire(egress: &Egress) -> wire::Egress {
    wire::Egress {
        refuse_others: egress.otherwise == Otherwise::Refuse,
        refuse: egress.refuse.iter().map(ToString::to_string).collect(),
        allow: egress.allow.iter().map(allow_to_wire).collect(),
    }
}

pub(super) fn wishes_from_wire(egress: Option<wire::Egress>, ipv6: bool) -> Result<BridgeWishes, Error> {
    Ok(BridgeWishes {
        egress: egress.map(egress_from_wire).transpose()?,
        versions: if ipv6 { IpVersions::Both } else { IpVersions::Ipv4 },
    })
}

fn egress_from_wire(egress: wire::Egress) -> Result<Egress, Error> {
    let network = |text: &String| text.parse().map_err(|_| Error::Field("egress.refuse"));
    Ok(Egress {
        otherwise: if egress.refuse_others { Otherwise::Refuse } else { Otherwise::Allow },
        refuse: egress.refuse.iter().map(network).collect::<Result<_, _>>()?,
        allow: egress.allow.into_iter().map(allow_from_wire).collect::<Result<_, _>>()?,
    })
}

fn allow_to_wire(allow: &Allow) -> wire::Allow {
    let (to, ports, private_addresses) = match allow {
        Allow::Network { to, ports } => (wire::allow::To::Network(to.to_string()), ports, false),
        Allow::Name { name, ports, scope } => {
            (wire::allow::To::Name(String::from(name.clone())), ports, *scope == Scope::Anywhere)
        }
    };
    let ports = match ports {
        Ports::Any => Vec::new(),
        Ports::Only(ranges) => ranges.iter().map(range_to_wire).collect(),
    };
    wire::Allow { to: Some(to), ports, private_addresses }
}

fn allow_from_wire(allow: wire::Allow) -> Result<Allow, Error> {
    let ports = match allow.ports.is_empty() {
        true => Ports::Any,
        false => Ports::Only(allow.ports.into_iter().map(range_from_wire).collect::<Result<_, _>>()?),
    };
    let wrong = |_| Error::Field("egress.allow");
    match allow.to.ok_or(Error::Field("egress.allow"))? {
        wire::allow::To::Network(to) => Ok(Allow::Network { to: to.parse().map_err(wrong)?, ports }),
        wire::allow::To::Name(name) => Ok(Allow::Name {
            name: name.parse().map_err(|_| Error::Field("egress.allow"))?,
            ports,
            scope: if allow.private_addresses { Scope::Anywhere } else { Scope::Public },
        }),
    }
}

fn range_to_wire(range: &PortRange) -> wire::PortRange {
    wire::PortRange {
        udp: range.transport == Transport::Udp,
        first: range.first.into(),
        last: range.last.into(),
    }
}

fn range_from_wire(range: wire::PortRange) -> Result<PortRange, Error> {
    let port = |number: u32| u16::try_from(number).map_err(|_| Error::Field("egress.allow.ports"));
    let transport = if range.udp { Transport::Udp } else { Transport::Tcp };
    Ok(PortRange { transport, first: port(range.first)?, last: port(range.last)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_comes_out_as_it_went_in() {
        let egress = Egress {
            otherwise: Otherwise::Refuse,
            refuse: vec!["10.0.0.0/8".parse().unwrap()],
            allow: vec![
                "192.0.2.0/24".parse().unwrap(),
                "*.example.com:443".parse().unwrap(),
                "[fd00::/8]:53/udp".parse().unwrap(),
                Allow::Name {
                    name: "db.internal".parse().unwrap(),
                    ports: Ports::Only([1, 2].map(|port| PortRange::one(Transport::Tcp, port)).into()),
                    scope: Scope::Anywhere,
                },
            ],
        };
        let wishes = wishes_from_wire(Some(egress_to_wire(&egress)), true).unwrap();
        assert_eq!(wishes, BridgeWishes { egress: Some(egress), versions: IpVersions::Both });
        assert!(wishes_from_wire(None, false).unwrap().is_none());
    }

    #[test]
    fn a_policy_that_says_nothing_sensible_is_refused() {
        let with =
            |allow| wishes_from_wire(Some(wire::Egress { allow: vec![allow], ..Default::default() }), false);
        let name = |name: &str| wire::allow::To::Name(name.to_owned());
        assert!(with(wire::Allow::default()).is_err());
        assert!(with(wire::Allow { to: Some(name("a b")), ..Default::default() }).is_err());
        let ports = vec![wire::PortRange { udp: false, first: 1, last: 1 << 16 }];
        assert!(with(wire::Allow { to: Some(name("a")), ports, ..Default::default() }).is_err());
    }
}
