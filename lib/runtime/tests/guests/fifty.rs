//! Launches that are asked for at the same time: what one costs its owner does not grow with those beside it.

use std::collections::BTreeMap;

use imp_runtime::DriverChoice;
use imp_runtime::spec::Memory;
use imp_runtime::status::{StageName, State, VmStatus};
use rustix::process::Signal;

use super::driver::on_driver;
use super::host::{Host, kill, outcome};
use super::owner::{Owner, Then};

const MIB: u64 = 1 << 20;
/// All at once, where there is memory for so many.
const MOST: u64 = 50;
/// What a machine keeps for itself, and a little.
const KEPT: u64 = 320 * MIB;
/// What one launch costs is seen by this many.
const FEW: u64 = 4;
/// How much more one may cost for all the others beside it.
const MORE: f64 = 3.0;

/// With its VMM.
fn memory_of_one() -> u64 {
    match crate::DRIVER {
        DriverChoice::Firecracker => 120 * MIB,
        DriverChoice::Qemu | DriverChoice::Auto => 320 * MIB,
    }
}

fn has_process(status: &VmStatus) -> bool {
    status.stages.iter().any(|stage| stage.name == StageName::Spawned)
}

/// What it costs an owner, in ticks of its processor time, to launch so many VMs. None of them gets to run, which would take the
/// time of the others, before all have a process.
async fn cost(host: &Host, count: u64) -> f64 {
    let spec = |number| {
        let mut spec = host.spec(&format!("vm-{number}"), &["true"]);
        spec.memory = Memory::from_bytes(96 * MIB).unwrap();
        (spec, Then::LetRun)
    };
    let mut owner = Owner::start(host, host.config(), (0..count).map(spec).collect());
    let mut spawned = BTreeMap::new();
    while (spawned.len() as u64) < count {
        let status = owner.next();
        assert_ne!(status.state, State::Stopped, "{:?}", status.outcome);
        assert_ne!(status.state, State::Running, "{} runs before all have a process", status.name);
        if !has_process(&status) {
            continue;
        }
        let pid = status.vmm_pid.unwrap();
        if spawned.insert(status.id, pid).is_none() {
            kill(pid, Signal::STOP);
        }
    }
    let ticks = owner.processor_ticks();
    owner.kill();
    for pid in spawned.values() {
        kill(*pid, Signal::KILL);
    }
    let runtime = host.open().await;
    for id in spawned.keys() {
        outcome(&runtime, id).await;
        runtime.remove(id).await.unwrap();
    }
    ticks as f64
}

#[test]
fn a_launch_costs_as_much_as_ever_when_fifty_are_asked_for_at_once() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let room = runtime.machine().memory_available.saturating_sub(KEPT) / memory_of_one();
        drop(runtime);
        let many = room.min(MOST);
        assert!(many >= 2 * FEW, "there is memory for {many} only");
        // The first of all pays for what is made once.
        cost(&host, 1).await;
        let (one, few, all) = (cost(&host, 1).await, cost(&host, FEW).await, cost(&host, many).await);
        println!("1: {one} ticks, {FEW}: {few} ticks, {many}: {all} ticks");
        // Less than a tick is not seen.
        let (alone, beside_all) = (one.max(few / FEW as f64).max(1.0), all / many as f64);
        assert!(beside_all <= MORE * alone, "{beside_all} ticks each, and one alone {alone}");
        host.end(host.open().await).await;
    });
}
