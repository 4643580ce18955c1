//! Networks of VMs: a namespace, a tap and an uplink for each, filtered, translated, and made without any other program.

pub mod addresses;
mod apply;
mod borrowed;
pub mod dns;
pub mod egress;
pub mod names;
mod netlink;
mod networks;
pub mod nft;
mod observe;
mod opening;
pub mod plan;
pub mod spec;

pub use apply::ApplyError;
pub use borrowed::{Borrowed, Lodger, trial};
pub use netlink::NetlinkError;
pub use networks::{NetworkError, Networks, host_routes, obstacles, outward_mtu};
pub use observe::ObserveError;
pub use opening::{Admission, Opening};
