//! The promises that hold with every driver: one list for the programs that keep them, [`crate::DRIVER`] tells which.

pub(crate) mod driver;
mod exec;
mod files;
mod init;
mod interrupted;
mod memory;
pub(crate) mod network;
mod owner;
mod program;
mod run;
mod user_network;
