//! What tests, the demo and the benchmarks share: images without a registry, what they need from the machine, and the
//! check that nothing is left behind.

pub mod husk;
pub mod images;
pub mod imp;
pub mod leftovers;
pub mod machine;
pub mod node;
pub mod oci;
pub mod registry;
pub mod small_disk;
pub mod terminal;
pub mod world;
