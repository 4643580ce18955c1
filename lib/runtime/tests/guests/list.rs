//! The tests, for every driver the same.

mod agent;
mod between;
pub(crate) mod bridge;
mod crash;
pub(crate) mod disk;
mod driver;
mod ends;
mod fork;
pub(crate) mod host;
mod hostile;
mod inside;
mod ledger;
mod limits;
mod many;
mod memory;
mod network;
pub(crate) mod owner;
mod pause;
mod reach;
mod restore;
mod template;
