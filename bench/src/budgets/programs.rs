//! The programs themselves: how fast the CLI starts, how large the guest agent is.

use std::process::Command;

use imp_testkit::machine;

use crate::measure::{alternate, time};
use crate::programs::run;
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 101;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    Ok(vec![version()?, agent_size()?])
}

fn version() -> anyhow::Result<Line> {
    let imp = machine::imp()?;
    let [ours, floor] = alternate(
        ROUNDS,
        [&mut || time(|| run(Command::new(&imp).arg("--version"))), &mut || {
            time(|| run(&mut Command::new("/bin/true")))
        }],
    )?;
    Ok(Line {
        name: "imp --version / true",
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio: 5.0 },
    })
}

fn agent_size() -> anyhow::Result<Line> {
    let size = machine::guest_agent()?.metadata()?.len();
    let limit = Limit::AtMost(Quantity::Bytes(6 << 20));
    Ok(Line { name: "guest agent on disk", ours: Quantity::Bytes(size), limit })
}
