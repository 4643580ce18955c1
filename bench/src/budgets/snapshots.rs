//! VMs of snapshots, against the VMM with the same snapshot and a minimal client: the same table for each driver. Times of
//! guests that are emulated are shown and not judged.

use imp_testkit::imp::Driver;

use crate::report::{Limit, Line, Quantity};

pub(super) mod activation;
pub(super) mod density;
pub(super) mod fork;

const MEMORY_MIB: u64 = 128;

/// Ours against a floor, judged where guests run as they should.
fn against(driver: Driver, name: &'static str, ours: Quantity, floor: Quantity, ratio: f64) -> Line {
    let limit = match driver {
        Driver::Firecracker => Limit::AtMostTimes { floor, ratio },
        Driver::Qemu => Limit::Shown { floor },
    };
    Line { name, ours, limit }
}
