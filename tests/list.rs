//! The promises that hold with every driver: one list for the programs that keep them, [`crate::DRIVER`] tells which.

mod driver;
mod exec;
mod files;
mod forks;
mod init;
pub(crate) mod network;
mod owner;
mod pools;
mod program;
mod run;
mod templates;
mod user_network;
