//! The owner of one user's VMs: a background process that serves the engine on a unix socket, and the way to it.

mod attach;
mod candidates;
pub mod client;
mod idle;
mod lane;
pub mod layout;
mod log;
pub mod name;
mod pools;
mod proxy;
mod records;
pub mod report;
pub mod serve;
mod server;
pub mod start;
mod template_names;
mod under_way;
pub mod wire;

pub use client::Owner;
