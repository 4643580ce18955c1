//! The tests, for every driver the same.

mod agent;
mod between;
mod bridge;
mod crash;
mod driver;
mod ends;
mod host;
mod hostile;
mod inside;
mod ledger;
mod many;
mod memory;
mod network;
mod owner;
mod reach;
