//! The engine of one machine: VMs with their disks, networks, limits and records, from creation to removal.

mod admission;
mod boot;
mod cgroup;
mod changes;
mod console;
mod doctor;
pub mod forward;
mod guest;
mod id;
pub mod layout;
mod ledger;
mod lifecycle;
mod logs;
pub mod made_up;
pub mod metering;
mod network;
pub mod pins;
mod ports;
mod prefetch;
mod process;
mod random;
mod restore;
mod runtime;
pub mod spec;
pub mod status;
pub mod template;
mod usage;
mod vm;
mod vmm;

pub use admission::{Machine, Refusal};
pub use doctor::{Check, Verdict, examine};
pub use guest::{GuestHold, Lane};
pub use id::{NotAVmId, VmId};
pub use imp_storage::blob::digest::Digest;
pub use logs::{LogEnd, LogEntry, LogQuery, LogReader, LogStream};
pub use network::Refused as NetworkRefused;
pub use runtime::{
    Config, Error, ForkRequest, ForkSnapshot, Forked, NotReclaimed, Runtime, SnapshotFacts, SnapshotKind,
    Suspended, VmReference, WithSecrets, WriteTimes,
};
pub use vm::{NotActivated, RestError};
pub use vmm::drivers::DriverChoice;
