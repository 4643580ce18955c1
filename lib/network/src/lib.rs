//! Networks of VMs: a namespace, a tap and an uplink for each, filtered, translated, and made without any other program.

pub mod addresses;
pub mod egress;
pub mod names;
mod netlink;
pub mod nft;
pub mod plan;
pub mod spec;

pub use netlink::NetlinkError;
