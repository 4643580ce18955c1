//! Real guests: the real kernel, the real agent, a real QEMU. One program, so that it is linked once.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod crash;
mod ends;
mod host;
mod hostile;
mod inside;
mod ledger;
mod many;
mod network;
mod owner;
mod reach;
