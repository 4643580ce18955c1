//! Programs in a VM that is there: one after another, and twenty at once.

use std::time::Duration;

use imp_protocol::connection::Connection;
use imp_testkit::imp::Driver;
use tokio::task::JoinSet;

use crate::guest;
use crate::machine::Machine;
use crate::measure::{alternate, time};
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 31;
const AT_ONCE: usize = 20;
/// The guest's clock counts hundredths of a second: enough programs to make one of them small.
const IN_GUEST: u32 = 200;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Qemu)
}

pub(crate) fn measure_in_firecracker() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Firecracker)
}

fn measure_with(driver: Driver) -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(driver)?;
    let vm = machine.start()?;
    let agent = machine.guest(&vm)?;
    let run = |work: std::pin::Pin<Box<dyn Future<Output = anyhow::Result<()>> + '_>>| {
        time(|| machine.runtime.block_on(work))
    };
    let start = in_guest(
        &machine,
        &agent,
        &format!("i=0; while [ $i -lt {IN_GUEST} ]; do /bin/true; i=$((i+1)); done"),
    )? / IN_GUEST;
    let [exec, ping] = alternate(
        ROUNDS,
        [&mut || run(Box::pin(async { guest::exec(&agent, &["/bin/true"]).await.map(drop) })), &mut || {
            run(Box::pin(guest::ping(&agent)))
        }],
    )?;
    // By themselves: what the guest does once twenty programs have ended would be counted as the next one's.
    let [twenty] = alternate(ROUNDS, [&mut || run(Box::pin(at_once(&agent)))])?;
    machine.remove(&vm)?;
    let times = |name, ours, floor, ratio| Line {
        name,
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio },
    };
    Ok(vec![
        times("exec of true / ping + fork and exec", exec, ping + start, 2.0),
        times(
            "20 execs at once / 20 x (ping + fork and exec)",
            twenty,
            (ping + start) * AT_ONCE as u32,
            1.25,
        ),
    ])
}

fn in_guest(machine: &Machine, agent: &Connection, script: &str) -> anyhow::Result<Duration> {
    machine.runtime.block_on(guest::timed(agent, script))
}

async fn at_once(agent: &Connection) -> anyhow::Result<()> {
    let mut execs = JoinSet::new();
    for _ in 0..AT_ONCE {
        let agent = agent.clone();
        execs.spawn(async move { guest::exec(&agent, &["/bin/true"]).await });
    }
    while let Some(ended) = execs.join_next().await {
        ended??;
    }
    Ok(())
}
