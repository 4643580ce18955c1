//! Images: what one costs whose disk is there already.

use std::process::Command;

use imp_testkit::imp::Driver;
use imp_testkit::{images, machine};

use crate::machine::Machine;
use crate::measure::{alternate, time};
use crate::programs::run;
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 51;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Qemu)?;
    let imp = machine::imp()?;
    let layout = format!("oci:{}", images::python()?.display());
    let import = ["image", "import", "--quiet", &layout];
    run(machine.imp()?.args(import))?;
    let [ours, floor] = alternate(
        ROUNDS,
        [&mut || time(|| run(machine.imp()?.args(import))), &mut || {
            time(|| run(Command::new(&imp).arg("--version")))
        }],
    )?;
    Ok(vec![Line {
        name: "an image already built / imp --version",
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio: 3.0 },
    }])
}
