//! The owner as its clients find it, whatever runs its VMs: started once, in nobody's way, gone when nobody needs it.

use imp_testkit::imp::{Imp, wait_until};

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn two_commands_at_once_start_one_owner() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let children: Vec<_> =
        (0..8).map(|_| imp.command(["inspect", "nobody"]).spawn()).collect::<Result<_, _>>()?;
    for child in children {
        let came = imp_testkit::imp::finish(child)?;
        assert_eq!(came.code, Some(1));
        assert!(came.stderr.contains("no VM is called \"nobody\""), "{}", came.stderr);
    }
    assert!(imp.owner_pid()?.is_some());
    imp.end()
}

#[test]
fn a_silent_client_delays_nobody() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    imp.run(["inspect", "nobody"])?;
    let silent: Vec<_> =
        (0..16).map(|_| std::os::unix::net::UnixStream::connect(imp.socket())).collect::<Result<_, _>>()?;
    assert_eq!(imp.run(["inspect", "nobody"])?.code, Some(1));
    drop(silent);
    imp.end()
}

#[test]
fn an_owner_that_nobody_needs_ends() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let came = imp_testkit::imp::finish(
        imp.command(["inspect", "nobody"]).env("IMP_OWNER_IDLE_SECONDS", "0").spawn()?,
    )?;
    assert_eq!(came.code, Some(1));
    wait_until("the owner is gone", || Ok(imp.owner_pid()?.is_none()))?;
    imp.end()
}

#[test]
fn a_misspelt_name_brings_the_right_one() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    imp.run(["run", "-d", "--name", "database", "--network", "none", IMAGE, "sleep", "100"])?.good()?;
    let came = imp.run(["stop", "databse"])?;
    assert_eq!(came.code, Some(1));
    assert!(came.stderr.contains("did you mean \"database\"?"), "{}", came.stderr);
    let came = imp.run(["rm", "database"])?;
    let running = "it is running: stop it first with `imp stop`, or remove it with `imp rm -f`\n";
    assert!(came.code == Some(1) && came.stderr.ends_with(running), "{}", came.stderr);
    assert_eq!(imp.run(["kill", "database"])?.code, Some(0));
    assert_eq!(imp.run(["wait", "database"])?.good()?, "137\n");
    imp.end()
}

#[test]
fn a_detached_vm_that_does_not_start_is_this_commands_failure() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let came =
        imp.run(["run", "-d", "--name", "vm", "--network", "none", "imp.test/busybox", "nosuchprogram"])?;
    assert_eq!(came.code, Some(127), "{}", came.stderr);
    assert!(came.stderr.contains("no such program"), "{}", came.stderr);
    imp.run(["rm", "vm"])?.good()?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = format!("{}:80", taken.local_addr()?);
    let came = imp.run(["run", "-d", "--name", "vm", "-p", &port, "imp.test/busybox", "sleep", "1000"])?;
    assert_eq!(came.code, Some(125), "{}", came.stdout);
    assert!(came.stderr.contains(port.trim_end_matches(":80")), "{}", came.stderr);
    // No stop first: it is on its way out.
    imp.run(["rm", "vm"])?.good()?;
    imp.end()
}
