//! A VM around its program: taken away before it starts, gone when it has ended, alone meanwhile; and how long that took.

use std::io::Write;

use imp_testkit::imp::{Imp, finish, wait_until};
use imp_testkit::terminal;

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

fn sh(script: &str) -> Vec<String> {
    ["run", "--rm", "--network", "none", IMAGE, "sh", "-c", script].map(str::to_owned).to_vec()
}

#[test]
fn a_signal_before_the_program_has_started_takes_the_vm_away_again() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let starting = || {
        let listed: serde_json::Value = serde_json::from_str(&imp.run(["ps", "-o", "json"])?.good()?)?;
        anyhow::Ok(listed.pointer("/0/state").is_some_and(|state| state == "starting"))
    };
    let nothing = || anyhow::Ok(imp.run(["ps", "-aq"])?.good()?.is_empty());
    let line = ["run", "--network", "none", IMAGE, "sleep", "1000"];
    for (signal, code) in [("-TERM", 143), ("-HUP", 129)] {
        let child = imp.command(line).spawn()?;
        wait_until("the VM is on its way", starting)?;
        let status = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status()?;
        assert!(status.success());
        assert_eq!(finish(child)?.code, Some(code));
        assert!(nothing()?, "{signal}");
    }
    // In the background too.
    let child = imp.command(["run", "-d"].into_iter().chain(line.into_iter().skip(1))).spawn()?;
    wait_until("the VM is on its way", starting)?;
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
    let came = finish(child)?;
    assert_eq!((came.code, came.stdout.as_str()), (Some(130), ""));
    assert!(nothing()?);
    // At a terminal, by key: it is no input that waits for the program.
    let run = imp.command(["run", "-it"].into_iter().chain(line.into_iter().skip(1)));
    let mut child = terminal::command(&run)?.spawn()?;
    let mut keys = child.stdin.take().ok_or_else(|| anyhow::anyhow!("no stdin"))?;
    wait_until("the VM is on its way", starting)?;
    keys.write_all(b"\x03")?;
    assert_eq!(finish(child)?.code, Some(130));
    assert!(nothing()?);
    imp.end()
}

#[test]
fn one_vm_destroys_neither_the_image_nor_another_vm() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    imp.run(sh("rm -rf / 2>/dev/null; true"))?;
    assert_eq!(imp.run(sh("echo alive"))?.good()?, "alive\n");
    imp.end()
}

#[test]
fn a_vm_with_rm_is_gone_when_its_program_has_ended() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    imp.run(sh("true"))?.good()?;
    wait_until("no VM is listed", || Ok(imp.run(["ps", "-aq"])?.good()?.is_empty()))?;
    imp.end()
}

#[test]
fn timings_show_the_stages_of_the_vm_too() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let came = imp.run(["run", "--rm", "--timings", "--network", "none", IMAGE, "echo", "x"])?;
    let stages = ["image found", "disk found", "owner found", "VMM spawned", "agent answered"];
    let later = ["guest configured", "program started", "first byte", "end known"];
    let mut rest = came.stderr.as_str();
    for stage in stages.into_iter().chain(later) {
        let (_, after) = rest.split_once(stage).ok_or_else(|| anyhow::anyhow!("{stage}: {}", came.stderr))?;
        rest = after;
    }
    assert_eq!(came.good()?, "x\n");
    imp.end()
}
