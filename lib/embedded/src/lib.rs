//! The owner of one user's VMs: a background process that serves the engine on a unix socket, and the way to it.

mod attach;
mod candidates;
pub mod client;
mod idle;
mod lane;
pub mod layout;
mod log;
mod proxy;
pub mod report;
pub mod serve;
mod server;
pub mod start;
mod under_way;
pub mod wire;

pub use client::Owner;
