//! From a prepared VM, and from none, to the first program that has run in it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use imp_runtime::Digest;
use imp_testkit::imp::Driver;

use super::{MEMORY_MIB, against};
use crate::engine::Engine;
use crate::floor::{Client, first_answer, first_exec};
use crate::measure::{alternate, time};
use crate::programs::run;
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 9;
const ROUNDS_COLD: usize = 5;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Qemu)
}

pub(crate) fn measure_in_firecracker() -> anyhow::Result<Vec<Line>> {
    measure_with(Driver::Firecracker)
}

fn measure_with(driver: Driver) -> anyhow::Result<Vec<Line>> {
    let engine = Engine::new(driver)?;
    let template = engine.template(MEMORY_MIB)?;
    let like = engine.wait(engine.prepare(&template))?;
    let client = Client::new(&engine, engine.files(&template)?, &like)?;
    engine.wait(engine.end(&like))?;
    let [prepared, woken, answered] = alternate(
        ROUNDS,
        [&mut || activated(&engine, &template), &mut || resumed(&engine, &client, Until::Exec), &mut || {
            resumed(&engine, &client, Until::Answer)
        }],
    )?;
    let [restored, loaded] =
        alternate(ROUNDS, [&mut || restored(&engine, &template), &mut || loaded(&engine, &client)])?;
    let memory = engine.files(&template)?.memory;
    let [restored_cold, loaded_cold] = alternate(
        ROUNDS_COLD,
        [
            &mut || {
                cool(&memory)?;
                self::restored(&engine, &template)
            },
            &mut || {
                cool(&memory)?;
                self::loaded(&engine, &client)
            },
        ],
    )?;
    let ratio =
        |name, ours, floor, most| against(driver, name, Quantity::Time(ours), Quantity::Time(floor), most);
    Ok(vec![
        ratio("prepared to first exec / bare resume to exec", prepared, woken, 1.2),
        Line {
            name: "prepared to first exec / bare resume to ping",
            ours: Quantity::Time(prepared),
            limit: Limit::Shown { floor: Quantity::Time(answered) },
        },
        ratio("snapshot to first exec / bare load to exec", restored, loaded, 1.15),
        Line {
            name: "cold snapshot to first exec / bare and cold",
            ours: Quantity::Time(restored_cold),
            limit: Limit::Shown { floor: Quantity::Time(loaded_cold) },
        },
    ])
}

/// Takes a file out of the page cache.
fn cool(file: &Path) -> anyhow::Result<()> {
    run(Command::new("dd").arg(format!("if={}", file.display())).args(["iflag=nocache", "count=0"]))
}

fn activated(engine: &Engine, template: &Digest) -> anyhow::Result<Duration> {
    let id = engine.wait(engine.prepare(template))?;
    let taken = time(|| {
        engine.wait(async {
            engine.activate(&id).await?;
            engine.exec(&id).await
        })
    })?;
    engine.wait(engine.end(&id))?;
    Ok(taken)
}

fn restored(engine: &Engine, template: &Digest) -> anyhow::Result<Duration> {
    let mut made = None;
    let taken = time(|| {
        engine.wait(async {
            let id = made.insert(engine.restore(template).await?);
            engine.exec(id).await
        })
    })?;
    if let Some(id) = made {
        engine.wait(engine.end(&id))?;
    }
    Ok(taken)
}

enum Until {
    Exec,
    Answer,
}

fn resumed(engine: &Engine, client: &Client, until: Until) -> anyhow::Result<Duration> {
    let folder = engine.scratch()?;
    client.lay_out(folder.path())?;
    let mut machine = client.load(folder.path())?;
    time(|| {
        engine.wait(async {
            match until {
                Until::Exec => first_exec(machine.as_mut()).await,
                Until::Answer => first_answer(machine.as_mut()).await,
            }
        })
    })
}

fn loaded(engine: &Engine, client: &Client) -> anyhow::Result<Duration> {
    let folder = engine.scratch()?;
    client.lay_out(folder.path())?;
    let mut kept = None;
    time(|| {
        let machine = kept.insert(client.load(folder.path())?);
        engine.wait(first_exec(machine.as_mut()))
    })
}
