//! Storage of one machine: images pulled from registries or archives, and the disks that microVMs run from.

pub mod blob;
pub mod disk;
pub mod ext4;
pub mod gc;
pub mod image;
pub mod progress;
pub mod snapshots;
pub mod store;
