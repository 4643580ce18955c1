//! VMs live on by themselves: detached, listed, logged, stopped, and adopted by a new owner when the old one dies.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use imp_testkit::imp::{Imp, finish, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

fn detached(imp: &Imp, name: &str, script: &str) -> anyhow::Result<String> {
    let line =
        ["run", "-d", "--name", name, "--network", "none", "--stop-timeout", "1", IMAGE, "sh", "-c", script];
    Ok(imp.run(line)?.good()?.trim().to_owned())
}

#[test]
fn a_detached_vm_is_listed_logged_and_stopped() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let id =
            detached(&imp, "web", "trap 'exit 4' TERM; echo one; echo two; while :; do sleep 0.1; done")?;
        assert_eq!(imp.run(["ps", "-o", "name"])?.good()?, "web\n");
        let listed: serde_json::Value = serde_json::from_str(&imp.run(["ps", "-o", "json"])?.good()?)?;
        assert_eq!(listed.pointer("/0/id").and_then(|id| id.as_str()), Some(id.as_str()));
        assert_eq!(listed.pointer("/0/state").and_then(|state| state.as_str()), Some("running"));
        wait_until("the log is there", || Ok(imp.run(["logs", "web"])?.good()? == "one\ntwo\n"))?;
        assert_eq!(imp.run(["logs", "--tail", "1", "web"])?.good()?, "two\n");
        assert_eq!(imp.run(["stop", "web"])?.good()?, "web\n");
        assert_eq!(imp.run(["wait", "web"])?.good()?, "4\n");
        assert_eq!(imp.run(["ps", "-o", "name"])?.good()?, "");
        assert_eq!(imp.run(["ps", "-a", "-o", "name"])?.good()?, "web\n");
        assert_eq!(imp.run(["rm", id.get(..6).unwrap_or_default()])?.code, Some(0));
        assert_eq!(imp.run(["ps", "-a", "-o", "name"])?.good()?, "");
        imp.end()
    })
}

#[test]
fn an_owner_that_is_killed_leaves_its_vms_to_the_next_one() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        detached(&imp, "web", "echo first; while [ ! -e /go ]; do sleep 0.1; done; echo second; exit 5")?;
        let pid = imp.owner_pid()?;
        imp.kill_owner()?;
        // A stale socket is in the way now.
        assert_eq!(imp.run(["ps", "-o", "name"])?.good()?, "web\n");
        assert_ne!(imp.owner_pid()?, pid);
        assert_eq!(imp.run(["exec", "web", "touch", "/go"])?.code, Some(0));
        assert_eq!(imp.run(["wait", "web"])?.good()?, "5\n");
        assert_eq!(imp.run(["logs", "web"])?.good()?, "first\nsecond\n");
        imp.end()
    })
}

/// What the record of the only VM says of its start.
fn recorded_stage(imp: &Imp) -> Option<String> {
    let vm = fs::read_dir(imp.data().join("vms")).ok()?.next()?.ok()?;
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(vm.path().join("record.json")).ok()?).ok()?;
    Some(record.pointer("/stage/stage")?.as_str()?.to_owned())
}

/// Stops the command when its VM is on record; whether it has not asked for the start yet.
fn stopped_before_the_start(imp: &Imp, command: Pid) -> anyhow::Result<bool> {
    // The owner syncs the record before it answers the command: who looks all the time sees it sooner.
    let deadline = Instant::now() + Duration::from_secs(60);
    while recorded_stage(imp).is_none() {
        anyhow::ensure!(Instant::now() < deadline, "no VM is on record");
        std::thread::yield_now();
    }
    kill_process(command, Signal::STOP)?;
    // The owner has heard by then what it was told before.
    imp.run(["ps"])?.good()?;
    Ok(recorded_stage(imp).as_deref() == Some("created"))
}

#[test]
fn a_run_whose_owner_dies_between_the_creation_of_its_vm_and_its_start_makes_it_again() -> anyhow::Result<()>
{
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        // The owner is there already.
        imp.run(["run", "--rm", "--network", "none", IMAGE, "true"])?.good()?;
        for how in [&["--rm"][..], &["--name", "vm"]] {
            let line = [&["run", "--network", "none"], how, &[IMAGE, "echo", "ran"]].concat();
            // The command is quick: it may be too late, and then it ends as always.
            let mut tries = 0;
            loop {
                tries += 1;
                anyhow::ensure!(tries < 50, "the command was always faster");
                let child = imp.command(&line).spawn()?;
                let command = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no pid")?;
                let in_time = stopped_before_the_start(&imp, command)?;
                if in_time {
                    imp.kill_owner()?;
                }
                kill_process(command, Signal::CONT)?;
                let came = finish(child)?;
                assert_eq!((came.code, came.stdout.as_str()), (Some(0), "ran\n"), "{how:?}: {}", came.stderr);
                if !how.contains(&"--rm") {
                    imp.run(["rm", "vm"])?.good()?;
                }
                if in_time {
                    break;
                }
            }
        }
        imp.end()
    })
}

#[test]
fn a_run_with_rm_whose_program_ends_between_two_owners_has_all_its_output_and_its_exit_status()
-> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let script = "echo first; until [ -e /go ]; do sleep 0.1; done; seq 1000; exit 5";
        let line = ["run", "--rm", "--name", "web", "--network", "none", IMAGE, "sh", "-c", script];
        let child = imp.command(line).spawn()?;
        let command = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no pid")?;
        wait_until("it runs", || Ok(imp.run(["logs", "web"])?.stdout == "first\n"))?;
        // The command does not look for another owner meanwhile.
        kill_process(command, Signal::STOP)?;
        let end = "(sleep 1; touch /go) >/dev/null 2>&1 &";
        imp.run(["exec", "web", "sh", "-c", end])?.good()?;
        imp.kill_owner()?;
        let state = || -> anyhow::Result<Option<String>> {
            let listed: serde_json::Value =
                serde_json::from_str(&imp.run(["ps", "-a", "-o", "json"])?.good()?)?;
            Ok(listed.pointer("/0/state").and_then(|state| state.as_str()).map(str::to_owned))
        };
        wait_until("it has ended", || Ok(matches!(state()?.as_deref(), None | Some("stopped"))))?;
        kill_process(command, Signal::CONT)?;
        let came = finish(child)?;
        let expected: String = ["first\n".to_owned()]
            .into_iter()
            .chain((1..=1000).map(|number| format!("{number}\n")))
            .collect();
        assert_eq!((came.code, came.stdout), (Some(5), expected), "{}", came.stderr);
        // Nobody else is waited for.
        assert_eq!(imp.run(["ps", "-aq"])?.good()?, "");
        imp.end()
    })
}
