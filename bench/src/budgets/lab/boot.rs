//! From `imp run` to a program's output, one VM at a time and eight at once, against Firecracker itself.

use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use imp_testkit::imp::Driver;

use crate::budgets::run::first_byte;
use crate::firecracker::{MEMORY_MIB, Template};
use crate::guest;
use crate::machine::{IMAGE, Machine};
use crate::measure::{alternate, time};
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 7;
const ROUNDS_AT_ONCE: usize = 3;
const AT_ONCE: usize = 8;
const MOST: f64 = 1.1;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Firecracker)?;
    let kept = machine.scratch()?;
    let vm = machine.start()?;
    let template = Template::take(&machine, &vm, kept.path())?;
    machine.remove(&vm)?;
    let [one, floor_of_one] =
        alternate(ROUNDS, [&mut || ours(&machine, 1), &mut || bare(&machine, &template, 1)])?;
    let [eight, floor_of_eight] = alternate(
        ROUNDS_AT_ONCE,
        [&mut || ours(&machine, AT_ONCE), &mut || bare(&machine, &template, AT_ONCE)],
    )?;
    let line = |name, ours, floor| Line {
        name,
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio: MOST },
    };
    Ok(vec![
        line("imp run to first byte / bare Firecracker", one, floor_of_one),
        line("8 x imp run at once / 8 bare at once", eight, floor_of_eight),
    ])
}

fn ours(machine: &Machine, count: usize) -> anyhow::Result<Duration> {
    let memory = format!("{MEMORY_MIB}m");
    last_of(count, || {
        let line =
            ["run", "--rm", "--network", "none", "--cpus", "1", "-m", &memory, IMAGE, "--", "echo", "x"];
        first_byte(machine.imp()?.args(line))
    })
}

fn bare(machine: &Machine, template: &Template, count: usize) -> anyhow::Result<Duration> {
    last_of(count, || {
        let folder = machine.scratch()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut bare = None;
        // Its end is not part of it, as it is none of ours.
        time(|| {
            let bare = bare.insert(template.boot(folder.path(), None, None)?);
            runtime.block_on(async {
                let agent = bare.agent().await?;
                guest::ping(&agent).await?;
                guest::configure(&agent).await?;
                guest::exec(&agent, &["echo", "x"]).await.map(drop)
            })
        })
    })
}

/// Times of so many that begin together: the longest.
fn last_of(count: usize, work: impl Fn() -> anyhow::Result<Duration> + Sync) -> anyhow::Result<Duration> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(&work)).collect();
        let times = threads.into_iter().map(|thread| thread.join().ok().context("a thread panicked")?);
        let times = times.collect::<anyhow::Result<Vec<_>>>()?;
        times.into_iter().max().context("nothing was timed")
    })
}
