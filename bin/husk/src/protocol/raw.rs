//! Requests as they stand in a line, before anything in them has been looked at. A field that is null is not there.

use serde::Deserialize;
use serde_json::Value;

use super::Variables;

/// The first line of a connection's next request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OpLine {
    pub(super) op: String,
    pub(super) deadline_ms: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Prepare {
    pub(super) snapshot_dir: Option<String>,
    pub(super) expected_digest: Option<String>,
    pub(super) fork_snapshot: Option<bool>,
    pub(super) egress: Option<String>,
    pub(super) block_network: Option<bool>,
    pub(super) vm_id: Option<String>,
}

/// With all that an activation may hold elsewhere; what no husk of this kind can do is known, to be refused by name.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Activate {
    pub(super) snapshot_dir: Option<String>,
    pub(super) expected_digest: Option<String>,
    pub(super) env: Option<Variables>,
    pub(super) secrets: Option<Variables>,
    pub(super) egress: Option<String>,
    pub(super) block_network: Option<bool>,
    pub(super) vm_id: Option<String>,
    pub(super) fork_snapshot: Option<bool>,
    pub(super) network_overrides: Option<Value>,
    pub(super) network: Option<Value>,
    pub(super) volumes: Option<Value>,
    pub(super) token: Option<Value>,
    pub(super) allow: Option<Value>,
    pub(super) allow_cidrs: Option<Value>,
    pub(super) inbound: Option<Value>,
    pub(super) inbound_cidrs: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ForkSnapshot {
    pub(super) fork_id: Option<String>,
    pub(super) snapshot_dir: Option<String>,
    /// The machine stands still while it is written, and goes on, whatever this says.
    pub(super) pause_source: Option<bool>,
    /// There always is one.
    pub(super) require_mem_file: Option<bool>,
    pub(super) with_secrets: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RemoveForkSnapshot {
    pub(super) fork_id: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Status {}
