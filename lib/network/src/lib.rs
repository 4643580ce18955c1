//! Networks of VMs: a namespace, a tap and an uplink for each, filtered, translated, and made without any other program.

pub mod addresses;
mod apply;
pub mod dns;
pub mod egress;
pub mod names;
mod netlink;
mod networks;
pub mod nft;
mod observe;
pub mod plan;
pub mod spec;

pub use apply::ApplyError;
pub use netlink::NetlinkError;
pub use networks::{Admission, NetworkError, Networks, Opening, host_routes, obstacles};
pub use observe::ObserveError;
