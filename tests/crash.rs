//! Kill -9 of a command or of the owner at any point: what comes next works, and nothing is left behind.

use std::fs;

use imp_testkit::imp::{Imp, finish, wait_until};

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn an_owner_that_is_killed_while_a_vm_boots_leaves_a_vm_that_failed() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let child =
        imp.command(["run", "-d", "--name", "web", "--network", "none", IMAGE, "sleep", "1000"]).spawn()?;
    wait_until("it boots", || {
        Ok(imp.run(["inspect", "web"])?.code == Some(0) && imp.state("web")? == "starting")
    })?;
    imp.kill_owner()?;
    let came = finish(child)?;
    assert!(came.code == Some(125) && came.stderr.contains("owner"), "{}", came.stderr);
    wait_until("its end is known", || Ok(imp.state("web")? == "stopped"))?;
    assert_eq!(imp.run(["rm", "web"])?.good()?, "web\n");
    imp.end()
}

#[test]
fn an_owner_that_is_killed_under_an_exec_a_copy_and_a_stop_leaves_nothing() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let script = "trap '' TERM; while :; do sleep 0.1; done";
    let line = [
        "run",
        "-d",
        "--name",
        "web",
        "--network",
        "none",
        "--stop-timeout",
        "600",
        IMAGE,
        "sh",
        "-c",
        script,
    ];
    imp.run(line)?.good()?;
    let exec = imp.command(["exec", "web", "sh", "-c", "touch /begun; sleep 777"]).spawn()?;
    imp.run(["exec", "web", "truncate", "-s", "1G", "/big"])?.good()?;
    // Nobody reads it: the copy is under way until its owner is gone.
    let copy = imp.command(["cp", "web:/big", "-"]).spawn()?;
    wait_until("it runs", || Ok(imp.run(["exec", "web", "test", "-e", "/begun"])?.code == Some(0)))?;
    imp.kill_owner()?;
    let came = finish(exec)?;
    assert!(came.code == Some(125), "{}", came.stderr);
    let copied = finish(copy)?;
    assert_ne!(copied.code, Some(0), "{}", copied.stderr);
    assert!(copied.stdout.len() < 1 << 30, "the whole file came");
    let sleepers = "ps | grep -c '[s]leep 777'";
    wait_until("what it ran is killed", || {
        Ok(imp.run(["exec", "web", "sh", "-c", sleepers])?.stdout == "0\n")
    })?;
    let stop = imp.command(["stop", "web"]).spawn()?;
    wait_until("it stops", || Ok(imp.state("web")? == "stopping"))?;
    imp.kill_owner()?;
    assert_eq!(finish(stop)?.code, Some(1));
    // The program was asked to end and did not; the new owner's user decides.
    imp.run(["rm", "-f", "web"])?.good()?;
    imp.end()
}

#[test]
fn a_copy_and_a_stop_that_are_killed_leave_a_vm_that_works_and_stops() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let script =
        "trap 'until [ -e /end ]; do sleep 0.1; done; exit 4' TERM; mkdir /in; while :; do sleep 0.1; done";
    let line =
        ["run", "-d", "--name", "web", "--network", "none", "--stop-timeout", "600", IMAGE, "sh", "-c"];
    imp.run(line.iter().chain([&script]))?.good()?;
    wait_until("it runs", || Ok(imp.run(["exec", "web", "test", "-d", "/in"])?.code == Some(0)))?;
    let large = imp.folder().join("large");
    fs::File::create(&large)?.set_len(64 << 30)?;
    let mut copy = imp.command(["cp", &large.to_string_lossy(), "web:/in"]).spawn()?;
    // It gets its name when it is whole.
    let open = || -> anyhow::Result<String> {
        Ok(imp
            .run(["exec", "web", "sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c ' /in/'"])?
            .stdout)
    };
    wait_until("it is under way", || open().map(|open| open != "0\n"))?;
    copy.kill()?;
    copy.wait()?;
    // The half of a copy that nobody sends any more: not open, and gone.
    wait_until("nobody writes to it", || open().map(|open| open == "0\n"))?;
    assert_eq!(imp.run(["exec", "web", "ls", "-A", "/in"])?.good()?, "");
    fs::write(&large, "whole")?;
    imp.run(["cp", &large.to_string_lossy(), "web:/in"])?.good()?;
    assert_eq!(imp.run(["exec", "web", "cat", "/in/large"])?.good()?, "whole");

    let mut stop = imp.command(["stop", "web"]).spawn()?;
    wait_until("it stops", || Ok(imp.state("web")? == "stopping"))?;
    stop.kill()?;
    stop.wait()?;
    imp.run(["exec", "web", "touch", "/end"])?.good()?;
    assert_eq!(imp.run(["wait", "web"])?.good()?, "4\n");
    imp.end()
}

#[test]
fn eight_vms_start_at_once() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let start = |number: u32| {
        let line = ["run", "--rm", "--network", "none", "-m", "128m", IMAGE, "echo"].map(str::to_owned);
        imp.command(line.into_iter().chain([number.to_string()])).spawn()
    };
    let children = (0..8).map(start).collect::<Result<Vec<_>, _>>()?;
    for (number, child) in children.into_iter().enumerate() {
        assert_eq!(finish(child)?.good()?, format!("{number}\n"));
    }
    imp.end()
}
