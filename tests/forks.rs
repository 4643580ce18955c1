//! A VM that runs is forked: its children go on from where it is, and it goes on too. And one stands still until it is told to go on.

use anyhow::Context as _;
use imp_testkit::imp::{Imp, wait_until};

use super::promises::driver::on_driver;
use super::templates::json;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

/// A VM whose program holds a word in its memory.
fn start(imp: &Imp) -> anyhow::Result<()> {
    let script = "word=first; while :; do [ ! -e /say ] || { word=$(cat /say); rm /say; }; echo $word >/said; sleep 0.1; done";
    let line = ["run", "-d", "--name", "vm", "-m", "128m", "--network", "none", IMAGE, "sh", "-c", script];
    imp.run(line)?.good().map(drop)
}

fn say(imp: &Imp, vm: &str, word: &str) -> anyhow::Result<()> {
    imp.run(["exec", vm, "sh", "-c", &format!("echo {word} >/new && mv /new /say")])?.good().map(drop)
}

fn says(imp: &Imp, vm: &str, word: &str) -> anyhow::Result<()> {
    let said = || Ok(imp.run(["exec", vm, "cat", "/said"])?.stdout.trim() == word);
    wait_until(&format!("{vm} says {word}"), said)
}

#[test]
fn children_have_what_the_parent_had_in_memory_and_go_their_own_ways() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        start(&imp)?;
        says(&imp, "vm", "first")?;
        say(&imp, "vm", "parent")?;
        says(&imp, "vm", "parent")?;
        let forked =
            json(&imp, &["fork", "-n", "2", "--name", "child", "-e", "WORD=given", "-o", "json", "vm"])?;
        let paused =
            forked.get("paused_milliseconds").and_then(serde_json::Value::as_f64).context("no pause")?;
        assert!(paused > 0.0);
        assert_eq!(forked.pointer("/children/1/name"), Some(&"child-2".into()));
        says(&imp, "child-1", "parent")?;
        say(&imp, "child-1", "one")?;
        says(&imp, "child-1", "one")?;
        for vm in ["child-2", "vm"] {
            says(&imp, vm, "parent")?;
        }
        assert_eq!(imp.run(["exec", "child-2", "sh", "-c", "echo $WORD"])?.good()?, "given\n");
        // A fork of a fork.
        assert_eq!(
            imp.run(["fork", "--name", "grandchild", "-o", "name", "child-1"])?.good()?,
            "grandchild\n"
        );
        says(&imp, "grandchild", "one")?;
        imp.run(["rm", "-f", "vm", "child-1"])?.good()?;
        says(&imp, "child-2", "parent")?;
        says(&imp, "grandchild", "one")?;
        imp.end()
    })
}

#[test]
fn a_suspended_vm_is_on_disk_until_it_goes_on_as_the_one_it_was() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        start(&imp)?;
        says(&imp, "vm", "first")?;
        say(&imp, "vm", "kept")?;
        says(&imp, "vm", "kept")?;
        let boot = "/proc/sys/kernel/random/boot_id";
        let booted = imp.run(["exec", "vm", "cat", boot])?.good()?;
        assert_eq!(imp.run(["suspend", "vm"])?.good()?, "vm\n");
        assert_eq!(imp.run(["ps", "-aq"])?.good()?, "");
        // Nor does a clean-up take it.
        imp.run(["prune", "-a"])?.good()?;
        assert_eq!(imp.run(["ps", "--suspended", "-o", "name"])?.good()?, "vm\n");
        imp.run(["resume", "vm"])?.good()?;
        says(&imp, "vm", "kept")?;
        assert_eq!(imp.run(["exec", "vm", "cat", boot])?.good()?, booted);
        say(&imp, "vm", "again")?;
        says(&imp, "vm", "again")?;
        assert_eq!(imp.run(["ps", "--suspended", "-o", "name"])?.good()?, "");
        imp.run(["suspend", "vm"])?.good()?;
        imp.run(["rm", "vm"])?.good()?;
        assert_eq!(imp.run(["ps", "--suspended", "-q"])?.good()?, "");
        imp.end()
    })
}

#[test]
fn a_paused_vm_stands_still_until_it_is_resumed() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        start(&imp)?;
        says(&imp, "vm", "first")?;
        imp.run(["pause", "vm"])?.good()?;
        assert_eq!(imp.inspect("vm")?.get("state"), Some(&"paused".into()));
        let came = imp.run(["exec", "vm", "true"])?;
        assert_ne!(came.code, Some(0));
        assert!(came.stderr.contains("is paused"), "{}", came.stderr);
        imp.kill_owner()?;
        imp.run(["resume", "vm"])?.good()?;
        say(&imp, "vm", "again")?;
        says(&imp, "vm", "again")?;
        imp.end()
    })
}
