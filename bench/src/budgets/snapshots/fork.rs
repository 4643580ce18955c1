//! Children of a VM that runs, and how long it stands still for them.

use std::time::Duration;

use futures_util::future::try_join_all;
use imp_runtime::VmId;
use imp_testkit::imp::Driver;

use super::{MEMORY_MIB, against};
use crate::engine::Engine;
use crate::floor::{Client, Kind, Machine, first_exec};
use crate::measure::{alternate, time};
use crate::report::{Line, Quantity};

const CHILDREN: usize = 16;
const ROUNDS: usize = 3;
const ROUNDS_OF_ONE: usize = 5;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Qemu)
}

pub(crate) fn measure_in_firecracker() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Firecracker)
}

fn measure_with(driver: Driver) -> anyhow::Result<Vec<Line>> {
    let engine = Engine::new(driver)?;
    let template = engine.template(MEMORY_MIB)?;
    let parent = engine.wait(engine.restore(&template))?;
    engine.wait(engine.exec(&parent))?;
    let client = Client::new(&engine, engine.files(&template)?, &parent)?;
    let [children, restores] =
        alternate(ROUNDS, [&mut || forked(&engine, &parent), &mut || restored(&engine, &client)])?;

    let booted = engine.boot(MEMORY_MIB)?;
    let folder = engine.scratch()?;
    client.lay_out(folder.path())?;
    let mut bare = client.load(folder.path())?;
    engine.wait(first_exec(bare.as_mut()))?;
    let [paused, written] = alternate(
        ROUNDS_OF_ONE,
        [&mut || stood_still(&engine, &booted), &mut || wrote(&engine, bare.as_mut(), Kind::Full)],
    )?;
    let ratio =
        |name, ours, floor, most| against(driver, name, Quantity::Time(ours), Quantity::Time(floor), most);
    let mut lines = vec![
        ratio(
            "16-way fork, for each child / bare restores",
            children / CHILDREN as u32,
            restores / CHILDREN as u32,
            1.3,
        ),
        ratio("pause of a booted parent / bare snapshot", paused, written, 1.2),
    ];
    if driver == Driver::Firecracker {
        let [paused, written] = alternate(
            ROUNDS_OF_ONE,
            [&mut || stood_still(&engine, &parent), &mut || wrote(&engine, bare.as_mut(), Kind::Changes)],
        )?;
        lines.push(ratio("pause of a template's VM / bare changes", paused, written, 1.2));
    }
    Ok(lines)
}

/// Until each child has run a program.
fn forked(engine: &Engine, parent: &VmId) -> anyhow::Result<Duration> {
    let mut ids = Vec::new();
    let taken = time(|| {
        engine.wait(async {
            for child in engine.fork(parent, CHILDREN).await?.children {
                ids.push(child?.id.clone());
            }
            try_join_all(ids.iter().map(|id| engine.exec(id))).await.map(drop)
        })
    })?;
    engine.wait(try_join_all(ids.iter().map(|id| engine.end(id))))?;
    Ok(taken)
}

/// As many machines of one file, each until it has run a program.
fn restored(engine: &Engine, client: &Client) -> anyhow::Result<Duration> {
    let folders: Vec<_> = (0..CHILDREN).map(|_| engine.scratch()).collect::<Result<_, _>>()?;
    folders.iter().try_for_each(|folder| client.lay_out(folder.path()))?;
    let mut machines = Vec::new();
    time(|| {
        for folder in &folders {
            let mut machine = client.load(folder.path())?;
            engine.wait(first_exec(machine.as_mut()))?;
            machines.push(machine);
        }
        Ok(())
    })
}

/// The parent, which has run a program since.
fn stood_still(engine: &Engine, parent: &VmId) -> anyhow::Result<Duration> {
    engine.wait(async {
        engine.exec(parent).await?;
        let forked = engine.fork(parent, 1).await?;
        for child in forked.children {
            engine.end(&child?.id).await?;
        }
        Ok(forked.paused)
    })
}

fn wrote(engine: &Engine, bare: &mut dyn Machine, kind: Kind) -> anyhow::Result<Duration> {
    let folder = engine.scratch()?;
    let taken = time(|| bare.write_down(kind, folder.path()))?;
    // As ours, it runs a program before the next time.
    engine.wait(first_exec(bare))?;
    Ok(taken)
}
