//! Networks of VMs on a real kernel. Each test has a host of its own; all need root, iproute2 and nftables.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "what a test did not expect ends it, in its helpers too"
)]

mod borrowed;
mod filters;
mod leftovers;
mod listing;
mod names;
mod node;
mod published;
mod reach;
mod world;
