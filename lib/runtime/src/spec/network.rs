//! What a user may ask of a VM's network.

use std::net::SocketAddr;
use std::num::NonZeroU16;

pub use imp_network::addresses::{AddressError as PoolError, Pool};
pub use imp_network::egress::{
    Allow, Cidr, Egress, NamePattern, Otherwise, PatternError, PortRange, Ports, Scope,
};
pub use imp_network::spec::{Outside, Transport};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// A network of its own that reaches what the host reaches, but not the host's loopback. Needs no privileges.
    User,
    /// A tap in a network namespace of its own, filtered and translated by the kernel. Needs root.
    Bridge,
}

/// What only a bridge network can do for a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgeWishes {
    /// What the VM may reach; absent: everything but what no VM may.
    pub egress: Option<Egress>,
    pub versions: IpVersions,
}

impl BridgeWishes {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IpVersions {
    #[default]
    Ipv4,
    Both,
}

/// Where bridge networks get their addresses, and how they are seen outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeSettings {
    /// Absent: one that is free on this host, chosen when the first VM needs it.
    pub pool: Option<Pool>,
    pub outside: Outside,
}

impl Default for BridgeSettings {
    fn default() -> Self {
        Self { pool: None, outside: Outside::Masquerade }
    }
}

/// A port on the host that leads to one in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedPort {
    /// Port 0: any that is free; the status says which.
    pub host: SocketAddr,
    pub guest: NonZeroU16,
}
