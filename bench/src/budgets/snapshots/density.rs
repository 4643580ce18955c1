//! What VMs of one template take of their host's memory, and whether many of them come to life at once.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
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
    let mut lines = private(&engine)?;
    lines.extend(together(&engine, many)?);
    Ok(lines)
}

/// Of a VM that has run one program: against what its guest wrote and a bare VMM has for itself, and against a machine that
/// has run the same program without becoming somebody before.
fn private(engine: &Engine) -> anyhow::Result<Vec<Line>> {
    let template = engine.template(MEMORY_MIB)?;
    let memory = engine.files(&template)?.memory.metadata()?.ino();
    let like = engine.wait(engine.prepare(&template))?;
    let client = Client::new(engine, engine.files(&template)?, &like)?;
    engine.wait(engine.end(&like))?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let id = engine.wait(engine.prepare(&template))?;
        engine.wait(async {
            engine.activate(&id).await?;
            engine.exec(&id).await
        })?;
        let ours = Private::of(engine.vmm(&id)?, memory)?;
        engine.wait(engine.end(&id))?;
        let folder = engine.scratch()?;
        client.lay_out(folder.path())?;
        let mut machine = client.load(folder.path())?;
        engine.wait(first_exec(machine.as_mut()))?;
        let bare = Private::of(machine.pid(), memory)?;
        ensure!(ours.guest > 0 && bare.guest > 0, "a guest's memory is not where it is looked for");
        rounds.push((ours, bare));
    }
    let median = |size: fn(&(Private, Private)) -> u64| {
        let mut sizes: Vec<_> = rounds.iter().map(size).collect();
        sizes.sort_unstable();
        Quantity::Bytes(sizes.get(sizes.len() / 2).copied().unwrap_or_default())
    };
    let ours = median(|(ours, _)| ours.guest + ours.own);
    Ok(vec![
        against(
            engine.driver(),
            "private memory / the guest's and a bare VMM's",
            ours,
            median(|(ours, bare)| ours.guest + bare.own),
            1.1,
        ),
        Line {
            name: "private memory / of a bare machine",
            ours,
            limit: Limit::Shown { floor: median(|(_, bare)| bare.guest + bare.own) },
        },
    ])
}

/// Memory that this process alone has written.
#[derive(Debug, Default, PartialEq, Eq)]
struct Private {
    /// What its guest has written of the snapshot's memory.
    guest: u64,
    /// Everything else.
    own: u64,
}

impl Private {
    fn of(pid: u32, memory: u64) -> anyhow::Result<Self> {
        Self::in_mappings(&fs::read_to_string(format!("/proc/{pid}/smaps"))?, memory)
    }

    /// `memory`: number of the file that the guest's memory is a private mapping of.
    fn in_mappings(mappings: &str, memory: u64) -> anyhow::Result<Self> {
        let (mut private, mut is_guest) = (Self::default(), false);
        for line in mappings.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("Private_Dirty:") => {
                    let size = kilobytes(line, "Private_Dirty:")?;
                    *if is_guest { &mut private.guest } else { &mut private.own } += size;
                }
                // A mapping's own line: its range, rights, place in the file, the file's device and number.
                Some(range) if !range.ends_with(':') => {
                    is_guest = words.nth(3).and_then(|number| number.parse().ok()) == Some(memory);
                }
                _ => {}
            }
        }
        Ok(private)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_wrote_is_told_from_what_its_vmm_did() {
        let mappings = "\
7f00-7f10 rw-p 00000000 fe:00 77  /memory
Private_Dirty:        12 kB
VmFlags: rd wr
7f20-7f30 rw-p 00000000 fe:00 78  /memory
Private_Dirty:         4 kB
7f40-7f50 rw-p 00000000 00:00 0
Private_Clean:         8 kB
Private_Dirty:         8 kB
7f60-7f70 rw-p 00001000 fe:00 77  /memory
Private_Dirty:         1 kB
";
        let private = Private::in_mappings(mappings, 77).unwrap();
        assert_eq!(private, Private { guest: 13 << 10, own: 12 << 10 });
    }
}
