//! Runs a test with the driver that this program is for: QEMU's anywhere, Firecracker's where KVM runs guests.

use std::time::Duration;

use imp_testkit::imp::{Came, Driver};
use imp_testkit::node;

use crate::DRIVER;

/// Far above what any of these tests takes in a node, one processor emulated by another.
const IN_NODE: Duration = Duration::from_secs(600);

/// Call it first in the test, and do everything else in `test`.
pub(crate) fn on_driver(test: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    match DRIVER {
        Driver::Qemu => test(),
        Driver::Firecracker => {
            let mut result = Ok(());
            node::inside_within(IN_NODE, || result = test());
            result
        }
    }
}

/// Whether this promise is nobody's here: the driver has declared that no machine of its can have this network.
pub(super) fn lacks(came: &Came, network: &str) -> bool {
    let declared = format!("{} has no network of the kind `{network}`", DRIVER.name());
    let lacks = came.stderr.contains(&declared);
    if lacks {
        println!("not kept: {declared}");
    }
    lacks
}
