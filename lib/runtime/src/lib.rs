//! The engine of one machine: VMs with their disks, networks, limits and records, from creation to removal.

mod admission;
mod boot;
mod cgroup;
mod console;
mod doctor;
pub mod forward;
mod guest;
mod id;
pub mod layout;
mod ledger;
mod lifecycle;
mod logs;
mod network;
pub mod pins;
mod ports;
mod process;
mod random;
mod runtime;
pub mod spec;
pub mod status;
mod usage;
mod vm;
mod vmm;

pub use admission::{Machine, Refusal};
pub use doctor::{Check, Verdict, examine};
pub use guest::{GuestHold, Lane};
pub use id::{NotAVmId, VmId};
pub use logs::{LogEnd, LogEntry, LogQuery, LogReader, LogStream};
pub use network::Refused as NetworkRefused;
pub use runtime::{Config, Error, Runtime, VmReference};
pub use vmm::drivers::DriverChoice;
