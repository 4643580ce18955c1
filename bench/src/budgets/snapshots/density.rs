//! What VMs of one template take of their host's memory, and whether many of them come to life at once.

use std::fs::{self, File};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::{join_all, try_join_all};
use imp_runtime::{Digest, VmId};
use imp_testkit::imp::Driver;

use super::{MEMORY_MIB, against};
use crate::engine::Engine;
use crate::floor::{Client, first_exec};
use crate::measure::time;
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 3;
const LARGE_MIB: u64 = 256;
const MIB: u64 = 1 << 20;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Qemu, 8)
}

pub(crate) fn measure_in_firecracker() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Firecracker, 50)
}

fn measure_with(driver: Driver, many: usize) -> anyhow::Result<Vec<Line>> {
    let engine = Engine::new(driver)?;
    let mut lines = vec![private(&engine)?];
    lines.extend(together(&engine, many)?);
    Ok(lines)
}

/// Of a VM that has run one program, against a machine that has done the same for nobody.
fn private(engine: &Engine) -> anyhow::Result<Line> {
    let template = engine.template(MEMORY_MIB)?;
    let like = engine.wait(engine.prepare(&template))?;
    let client = Client::new(engine, engine.files(&template)?, &like)?;
    engine.wait(engine.end(&like))?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let id = engine.wait(engine.prepare(&template))?;
        engine.wait(async {
            engine.activate(&id).await?;
            engine.exec(&id).await
        })?;
        ours.push(written_by(engine.vmm(&id)?)?);
        engine.wait(engine.end(&id))?;
        let folder = engine.scratch()?;
        client.lay_out(folder.path())?;
        let mut machine = client.load(folder.path())?;
        engine.wait(first_exec(machine.as_mut()))?;
        floor.push(written_by(machine.pid())?);
    }
    let median = |mut sizes: Vec<u64>| {
        sizes.sort_unstable();
        Quantity::Bytes(sizes.get(sizes.len() / 2).copied().unwrap_or_default())
    };
    Ok(against(engine.driver(), "private memory after an exec / bare", median(ours), median(floor), 1.1))
}

/// Pages that only this process has because it, or its guest, wrote them.
fn written_by(pid: u32) -> anyhow::Result<u64> {
    let pages = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    kilobytes(&pages, "Private_Dirty:")
}

fn together(engine: &Engine, many: usize) -> anyhow::Result<Vec<Line>> {
    let template = engine.template(LARGE_MIB)?;
    // The template is there once, and so is all that the first VM needs.
    std::io::copy(&mut File::open(engine.files(&template)?.memory)?, &mut std::io::sink())?;
    let alone = brought_to_life(engine, &engine.wait(prepared(engine, &template, 1))?)?;
    let before = in_use()?;
    let ids = engine.wait(prepared(engine, &template, many))?;
    let each = Quantity::Bytes(in_use()?.saturating_sub(before) / many as u64);
    let all = brought_to_life(engine, &ids)?;
    let processors = std::thread::available_parallelism()?.get().min(many) as u32;
    let share = all * processors / many as u32;
    let (limit, driver) = (Quantity::Bytes(8 * MIB), engine.driver());
    let limit = match driver {
        Driver::Firecracker => Limit::AtMost(limit),
        Driver::Qemu => Limit::Shown { floor: limit },
    };
    let (memory, time) = match driver {
        Driver::Firecracker => {
            ("50 prepared: host memory for each", "50 activated at once, each / one alone")
        }
        Driver::Qemu => ("8 prepared: host memory for each", "8 activated at once, each / one alone"),
    };
    Ok(vec![
        Line { name: memory, ours: each, limit },
        against(driver, time, Quantity::Time(share), Quantity::Time(alone), 3.0),
    ])
}

/// One after the other, as a pool does it.
async fn prepared(engine: &Engine, template: &Digest, many: usize) -> anyhow::Result<Vec<VmId>> {
    let mut ids = Vec::new();
    for _ in 0..many {
        ids.push(engine.prepare(template).await?);
    }
    Ok(ids)
}

/// All at once, until each has run a program. They end.
fn brought_to_life(engine: &Engine, ids: &[VmId]) -> anyhow::Result<Duration> {
    let taken = time(|| {
        let lives = ids.iter().map(|id| async move {
            engine.activate(id).await?;
            engine.exec(id).await
        });
        engine.wait(try_join_all(lives)).map(drop)
    })?;
    let ends = ids.iter().map(|id| engine.end(id));
    engine.wait(join_all(ends)).into_iter().collect::<Result<(), _>>()?;
    Ok(taken)
}

/// Memory of this machine that holds something, files included.
fn in_use() -> anyhow::Result<u64> {
    let memory = fs::read_to_string("/proc/meminfo")?;
    Ok(kilobytes(&memory, "MemTotal:")?.saturating_sub(kilobytes(&memory, "MemFree:")?))
}

/// A field of the kernel's texts about memory, in bytes.
fn kilobytes(text: &str, field: &str) -> anyhow::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(number.with_context(|| format!("the kernel says nothing of {field}"))?.parse::<u64>()? << 10)
}
