//! Runs a test with the driver that this program is for: QEMU's anywhere, Firecracker's where KVM runs guests.

use std::time::Duration;

use imp_runtime::spec::NetworkMode;
use imp_runtime::{DriverChoice, Runtime};
use imp_testkit::node;

/// Far above what any of these tests takes in a node, one processor emulated by another.
const IN_NODE: Duration = Duration::from_secs(600);

/// Whether this test is for nobody here, because the driver declares that it cannot have this network.
pub(crate) fn lacks(runtime: &Runtime, network: NetworkMode) -> bool {
    let lacks = !runtime.networks().contains(&network);
    if lacks {
        println!("not for {:?}, which has no network of the kind {network:?}", crate::DRIVER);
    }
    lacks
}

/// Whether this test is for nobody here, because the driver declares that it makes no snapshots.
pub(crate) fn makes_none(runtime: &Runtime) -> bool {
    let none = !runtime.makes_snapshots();
    if none {
        println!("not for {:?}, which makes no snapshots", crate::DRIVER);
    }
    none
}

/// Call it first in the test, and do everything else in `test`.
pub(crate) fn on_driver(test: impl Future<Output = ()>) {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test);
    };
    match crate::DRIVER {
        DriverChoice::Firecracker => node::inside_within(IN_NODE, run),
        DriverChoice::Qemu | DriverChoice::Auto => run(),
    }
}
