//! What `imp` promises, with guests in Firecracker, where KVM runs guests. What is about clients,
//! owners, words and images alone, and what the engine's own tests do with every driver, is in the program of the other one;
//! so are templates, forks, pools and husks, whose snapshots take minutes to write and hash where guests are emulated twice, but for the
//! one template of the probe, without which nothing else is worth while.

use imp_testkit::imp::Driver;

/// What runs the guests of these tests.
const DRIVER: Driver = Driver::Firecracker;

mod probe;
#[path = "list.rs"]
mod promises;
