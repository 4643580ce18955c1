//! What `imp` promises, with guests in QEMU, on any machine; and what it promises whatever runs its guests.

use imp_testkit::imp::Driver;

/// What runs the guests of these tests.
const DRIVER: Driver = Driver::Qemu;

mod after_restore;
mod carry;
mod client;
mod crash;
mod egress;
mod forks;
mod husk;
mod husk_crash;
mod images;
mod life;
mod owner_storm;
mod pools;
#[path = "list.rs"]
mod promises;
mod pull;
mod templates;
mod terminal;
mod words;
