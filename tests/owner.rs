//! VMs live on by themselves: detached, listed, logged, stopped, and adopted by a new owner when the old one dies.

use imp_testkit::imp::{Imp, wait_until};

const IMAGE: &str = "imp.test/busybox";

fn detached(imp: &Imp, name: &str, script: &str) -> anyhow::Result<String> {
    let line =
        ["run", "-d", "--name", name, "--network", "none", "--stop-timeout", "1", IMAGE, "sh", "-c", script];
    Ok(imp.run(line)?.good()?.trim().to_owned())
}

#[test]
fn a_detached_vm_is_listed_logged_and_stopped() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let id = detached(&imp, "web", "trap 'exit 4' TERM; echo one; echo two; while :; do sleep 0.1; done")?;
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
}

#[test]
fn an_owner_that_is_killed_leaves_its_vms_to_the_next_one() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
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
}

#[test]
fn two_commands_at_once_start_one_owner() -> anyhow::Result<()> {
    let imp = Imp::new()?;
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
    let imp = Imp::new()?;
    imp.run(["inspect", "nobody"])?;
    let silent: Vec<_> =
        (0..16).map(|_| std::os::unix::net::UnixStream::connect(imp.socket())).collect::<Result<_, _>>()?;
    assert_eq!(imp.run(["inspect", "nobody"])?.code, Some(1));
    drop(silent);
    imp.end()
}

#[test]
fn an_owner_that_nobody_needs_ends() -> anyhow::Result<()> {
    let imp = Imp::new()?;
    let came = imp_testkit::imp::finish(
        imp.command(["inspect", "nobody"]).env("IMP_OWNER_IDLE_SECONDS", "0").spawn()?,
    )?;
    assert_eq!(came.code, Some(1));
    wait_until("the owner is gone", || Ok(imp.owner_pid()?.is_none()))?;
    imp.end()
}

#[test]
fn a_misspelt_name_brings_the_right_one() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    detached(&imp, "database", "sleep 100")?;
    let came = imp.run(["stop", "databse"])?;
    assert_eq!(came.code, Some(1));
    assert!(came.stderr.contains("did you mean \"database\"?"), "{}", came.stderr);
    assert_eq!(imp.run(["kill", "database"])?.code, Some(0));
    assert_eq!(imp.run(["wait", "database"])?.good()?, "137\n");
    imp.end()
}

#[test]
fn a_detached_vm_that_does_not_start_is_this_commands_failure() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
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
