//! Images: what they are called, where they come from, how they want to run, and how their layers become a disk.

pub mod archive;
pub mod base;
pub mod config;
#[cfg(test)]
pub(crate) mod hostile_json;
pub mod manifest;
pub mod platform;
pub mod reference;
pub mod registry;
