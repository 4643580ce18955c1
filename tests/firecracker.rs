//! What `imp` promises, with guests in Firecracker, where KVM runs guests. What is about clients,
//! owners, words and images alone, and what the engine's own tests do with every driver, is in the program of the other one;
//! so are templates, forks and pools, whose snapshots take minutes to write and hash where guests are emulated twice.

use imp_testkit::imp::Driver;

/// What runs the guests of these tests.
const DRIVER: Driver = Driver::Firecracker;

#[path = "list.rs"]
mod promises;
