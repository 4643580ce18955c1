//! Real guests in a real Firecracker: the same tests, where KVM runs guests.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

/// The driver under test.
const DRIVER: imp_runtime::DriverChoice = imp_runtime::DriverChoice::Firecracker;

#[path = "list.rs"]
mod engine;
// Of what only this driver has.
mod gate;
mod jailed;
mod unprivileged;
