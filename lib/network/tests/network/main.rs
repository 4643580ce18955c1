//! Networks of VMs on a real kernel. Each test has a host of its own; all need root, iproute2 and nftables.

mod filters;
mod leftovers;
mod listing;
mod names;
mod published;
mod reach;
mod world;
