//! What a user may ask of a VM that is made of a snapshot: all else is as it was in the machine that the snapshot is of.

use std::collections::BTreeMap;

use super::{BridgeWishes, Environment, HostName, PublishedPort, VmName, WhenStopped};

/// A VM that is to be made of a snapshot.
#[derive(Debug, Clone)]
pub struct Child {
    /// Unique among the VMs of one data directory.
    pub name: VmName,
    /// Absent: the first digits of its id.
    pub hostname: Option<HostName>,
    pub labels: BTreeMap<String, String>,
    pub ports: Vec<PublishedPort>,
    pub bridge: BridgeWishes,
    pub when_stopped: WhenStopped,
}

impl Child {
    /// One of this name, with nothing of its own besides.
    #[must_use]
    pub fn named(name: VmName) -> Self {
        Self {
            name,
            hostname: None,
            labels: BTreeMap::new(),
            ports: Vec::new(),
            bridge: BridgeWishes::default(),
            when_stopped: WhenStopped::Keep,
        }
    }
}

/// What whoever takes a prepared VM wants it to have. What is absent stays as it was prepared.
#[derive(Debug, Clone, Default)]
pub struct Claim {
    /// Unique among the VMs of one data directory.
    pub name: Option<VmName>,
    /// Besides those that it has.
    pub labels: BTreeMap<String, String>,
    pub ports: Vec<PublishedPort>,
    pub when_stopped: Option<WhenStopped>,
}

/// Who a prepared VM becomes.
#[derive(Debug, Clone, Default)]
pub struct Identity {
    /// Absent: the one that it was prepared with.
    pub hostname: Option<HostName>,
    /// Added to what every later process gets. Earlier ones keep theirs.
    pub environment: Environment,
    /// As `environment`, and never logged, listed or written. A VM that was given any is forked only by name.
    pub secrets: Environment,
}
