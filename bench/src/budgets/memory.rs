//! What stays resident: the owner's share of a VM, and the agent.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_testkit::imp::Driver;

use crate::guest;
use crate::machine::{Machine, Vm};
use crate::programs::memory;
use crate::report::{Limit, Line, Quantity};

const VMS: u64 = 4;
/// After this long without a client the owner has given back what it does not need.
const REST: Duration = Duration::from_secs(2);

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Qemu)?;
    let first = machine.start()?;
    let alone = resident(&machine)?;
    let vms: Vec<Vm> = (0..VMS).map(|_| machine.start()).collect::<Result<_, _>>()?;
    let together = resident(&machine)?;
    let agent = agent(&machine, &first)?;
    for vm in vms.iter().chain([&first]) {
        machine.remove(vm)?;
    }
    let line = |name, ours, limit: u64| Line {
        name,
        ours: Quantity::Bytes(ours),
        limit: Limit::AtMost(Quantity::Bytes(limit << 20)),
    };
    Ok(vec![
        line("owner at rest, resident with one VM", alone, 8),
        line("owner at rest, resident for each further VM", together.saturating_sub(alone) / VMS, 8),
        line("guest agent resident", agent, 5),
    ])
}

/// At rest: a client's visit brings in what serves it, for the moment.
fn resident(machine: &Machine) -> anyhow::Result<u64> {
    std::thread::sleep(REST);
    memory(machine.owner()?, "VmRSS:").context("the owner has ended")
}

/// What stays of us in a VM, as its kernel sees it: PID 1 and the agent that it started, which share the program's pages;
/// those count once.
const RESIDENT: &str = "for process in /proc/[0-9]*; do
  read -r name < $process/cmdline 2>/dev/null
  case $process:$name in /proc/1:*|*:@imp-agent*) grep ^Pss: $process/smaps_rollup ;; esac
done 2>/dev/null";

/// The agent after some work.
fn agent(machine: &Machine, vm: &Vm) -> anyhow::Result<u64> {
    let guest = machine.guest(vm)?;
    let status = machine.runtime.block_on(async {
        for _ in 0..20 {
            guest::exec(&guest, &["true"]).await?;
        }
        guest::exec(&guest, &["sh", "-c", RESIDENT]).await
    })?;
    let status = String::from_utf8(status)?;
    let sizes: Vec<u64> = status.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    ensure!(sizes.len() == 2, "not PID 1 and one agent: {status}");
    Ok(sizes.iter().sum::<u64>() << 10)
}
