//! Real guests: the real kernel, the real agent, a real QEMU. One program, so that it is linked once.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

/// The driver under test.
const DRIVER: imp_runtime::DriverChoice = imp_runtime::DriverChoice::Qemu;

#[path = "list.rs"]
mod engine;
