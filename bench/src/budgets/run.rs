//! How long `imp run` of an image that is there takes to its first byte of output.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::ensure;
use imp_testkit::imp::Driver;

use crate::bare::Template;
use crate::guest;
use crate::machine::{IMAGE, Machine};
use crate::measure::{alternate, time};
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 9;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Qemu)?;
    let kept = machine.scratch()?;
    let vm = machine.start()?;
    let template = Template::take(&vm, kept.path())?;
    machine.remove(&vm)?;
    let [ours, floor] = alternate(
        ROUNDS,
        [
            &mut || {
                first_byte(machine.imp()?.args([
                    "run",
                    "--rm",
                    "--network",
                    "none",
                    IMAGE,
                    "--",
                    "echo",
                    "x",
                ]))
            },
            &mut || bare(&machine, &template),
        ],
    )?;
    Ok(vec![Line {
        name: "imp run to first byte / bare VMM and exec",
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio: 1.15 },
    }])
}

/// Time to the first byte of output; the program then runs to its end.
pub(super) fn first_byte(command: &mut Command) -> anyhow::Result<Duration> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut output = Vec::new();
    let mut child = None;
    let taken = time(|| {
        let child = child.insert(command.spawn()?);
        let mut byte = [0];
        if let Some(stdout) = child.stdout.as_mut() {
            stdout.read_exact(&mut byte)?;
        }
        output.extend(byte);
        Ok(())
    })?;
    if let Some(mut child) = child {
        let status = child.wait()?;
        ensure!(status.success() && output == b"x", "{command:?} ended with {status}");
    }
    Ok(taken)
}

/// The same VMM to its agent's first answer, and one exec.
fn bare(machine: &Machine, template: &Template) -> anyhow::Result<Duration> {
    let folder = machine.scratch()?;
    let mut bare = None;
    time(|| {
        let bare = bare.insert(template.boot(folder.path(), None)?);
        machine.runtime.block_on(async {
            let agent = bare.agent().await?;
            guest::ping(&agent).await?;
            guest::configure(&agent).await?;
            guest::exec(&agent, &["echo", "x"]).await.map(drop)
        })
    })
}
