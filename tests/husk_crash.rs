//! Kill -9 of a husk at each step: the next one has a machine that can be trusted, or none, and leaves nothing.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use imp_testkit::husk::Husk;
use imp_testkit::imp::{Imp, finish};
use serde_json::Value;

use super::husk::{imp_in, only_the_template_is_left, template};
use crate::DRIVER;

/// What the record of the only machine says, once there is one.
fn recorded(workdir: &Path) -> Option<String> {
    let vm = fs::read_dir(workdir.join("vms")).ok()?.next()?.ok()?;
    let record: Value = serde_json::from_slice(&fs::read(vm.path().join("record.json")).ok()?).ok()?;
    Some(record.pointer("/stage/stage")?.as_str()?.to_owned())
}

/// Kills the husk as soon as this is so, or the client has its answer.
fn kill_when(husk: Husk, mut client: Child, is_so: impl Fn() -> bool) -> anyhow::Result<()> {
    // Steps are short: whoever sleeps between two looks sees none.
    let deadline = Instant::now() + Duration::from_secs(120);
    while !is_so() && client.try_wait()?.is_none() {
        ensure!(Instant::now() < deadline, "the step never came");
        std::thread::yield_now();
    }
    husk.kill()?;
    // It may have had its answer.
    finish(client)?;
    Ok(())
}

#[test]
fn a_husk_that_is_killed_while_it_prepares_leaves_a_dormant_machine_or_none() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    for stage in ["", "created", "starting", "booting", "dormant"] {
        let husk = Husk::start(&imp, "husk", &[])?;
        let workdir = husk.workdir();
        let client = husk.command("prepare", &flags)?.spawn()?;
        kill_when(husk, client, || stage.is_empty() || recorded(&workdir).is_some_and(|seen| seen == stage))?;
        let husk = Husk::start(&imp, "husk", &[])?;
        let state = husk.status("state")?;
        match state.as_str() {
            Some("new") => drop(husk.granted("prepare", &flags)?),
            Some("dormant") => {}
            _ => bail!("{stage}: {state}"),
        }
        husk.granted("activate", &[])?;
        husk.end()?;
        only_the_template_is_left(&imp, &digest)?;
    }
    imp.end()
}

#[test]
fn a_husk_that_is_killed_while_it_activates_leaves_a_machine_that_confirmed_or_none() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    for stage in ["", "waking", "running"] {
        let husk = Husk::start(&imp, "husk", &flags)?;
        let workdir = husk.workdir();
        let mut client = husk.command("activate", &["--secret", "TOKEN"])?;
        let client = client.env("TOKEN", "hunter2").spawn()?;
        kill_when(husk, client, || stage.is_empty() || recorded(&workdir).is_some_and(|seen| seen == stage))?;
        let husk = Husk::start(&imp, "husk", &[])?;
        let state = husk.status("state")?;
        match state.as_str() {
            // Nobody had asked its machine for anything.
            Some("dormant") => drop(husk.granted("activate", &[])?),
            // It was half activated, and is nobody's.
            Some("new") => assert_eq!(husk.status("vmm_pid")?, Value::Null),
            Some("active") => {
                let (_, again) = husk.ask("activate", &[])?;
                assert_eq!(again.get("already_active"), Some(&true.into()));
            }
            _ => bail!("{stage}: {state}"),
        }
        husk.end()?;
        only_the_template_is_left(&imp, &digest)?;
    }
    imp.end()
}

#[test]
fn a_husk_that_is_killed_while_its_machine_is_forked_leaves_a_machine_that_goes_on() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    let mut husk = Husk::start(&imp, "husk", &flags)?;
    husk.granted("activate", &[])?;
    let machine = husk.status("machine")?;
    let workdir = husk.workdir();
    let snapshots = imp.data().join("images/snapshots");
    let count = |path: &Path| fs::read_dir(path).map_or(0, Iterator::count);
    for step in ["record", "asleep", "snapshot", "link"] {
        let client = husk.command("fork-snapshot", &["--fork-id", step])?.spawn()?;
        kill_when(husk, client, || match step {
            "record" => workdir.join("fork-records").join(step).exists(),
            "asleep" => recorded(&workdir).is_some_and(|seen| seen == "asleep"),
            "snapshot" => count(&snapshots) == 2,
            _ => workdir.join("forks").join(step).is_symlink(),
        })?;
        husk = Husk::start(&imp, "husk", &[])?;
        assert_eq!(husk.status("state")?, "active", "{step}");
        assert_eq!(husk.status("machine")?, machine);
        let (code, answer) = husk.ask("remove-fork-snapshot", &["--fork-id", step])?;
        // There whole, or not at all.
        let kept = code == Some(0) || answer.get("code").context("no code")? == "no-fork";
        assert!(kept, "{step}: {answer}");
        only_the_template_keeps_room(&imp, &digest)?;
        assert_eq!((count(&workdir.join("forks")), count(&workdir.join("fork-records"))), (0, 0), "{step}");
    }
    husk.kill()?;
    assert_eq!(imp_in(&imp, &workdir, &["exec", "husk", "cat", "/said"])?.good()?, "ready\n");
    imp_in(&imp, &workdir, &["rm", "-f", "husk"])?.good()?;
    imp_in(&imp, &workdir, &["owner", "stop"])?.good()?;
    only_the_template_is_left(&imp, &digest)?;
    imp.end()
}

fn only_the_template_keeps_room(imp: &Imp, digest: &str) -> anyhow::Result<()> {
    let entries = fs::read_dir(imp.data().join("images/snapshots"))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    assert_eq!(names.collect::<anyhow::Result<Vec<_>>>()?, [digest]);
    Ok(())
}
