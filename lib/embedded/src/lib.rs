//! The owner of one user's VMs: a background process that serves the engine on a unix socket, and the way to it.

mod attach;
mod caller;
mod candidates;
pub mod client;
#[cfg(test)]
mod fixture;
mod idle;
mod lane;
pub mod layout;
mod log;
pub mod name;
mod pools;
mod proxy;
mod reach;
mod records;
mod refusal;
pub mod report;
pub mod serve;
mod server;
pub mod start;
mod template_names;
mod under_way;
pub mod wire;

pub use client::Owner;
