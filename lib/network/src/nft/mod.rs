//! nftables: tables as plain data, written to the kernel in one transaction and read back over netlink.

mod encode;
mod expressions;
mod kernel;
mod model;
mod read;
mod rule;
mod text;

pub(crate) use encode::{add_elements, remove_elements, remove_table, replace_table};
pub use model::{
    Action, Chain, ChainShape, Element, Family, Field, Hook, IpVersion, KeyPart, Match, Policy, Rule, Set,
    Table, TableId, TableShape, Test,
};
pub(crate) use read::{dropping_forward_chains, elements, tables_named};

use rustix::net::netlink;

use crate::netlink::{NetlinkError, Socket};

/// A socket for nftables in the calling thread's network namespace.
pub(crate) fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Some(netlink::NETFILTER))
}
