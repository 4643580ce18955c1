//! A VM that runs is forked: its children go on from where it is, and it goes on too. And one stands still until it is told to go on.

use anyhow::Context as _;
use imp_testkit::imp::{Imp, finish, wait_until};

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
        let digest = imp.run(["ps", "--suspended", "-q"])?.good()?.trim().to_owned();
        // It does not go on beside another one of its name.
        imp.run(["run", "-d", "--name", "vm", "--network", "none", IMAGE, "sleep", "1000"])?.good()?;
        let came = imp.run(["resume", &digest])?;
        assert!(came.code == Some(1) && came.stderr.contains("by its id"), "{}", came.stderr);
        imp.run(["rm", "-f", "vm"])?.good()?;
        // Nor does a clean-up take it.
        imp.run(["prune", "-a"])?.good()?;
        assert_eq!(imp.run(["ps", "--suspended", "-o", "name"])?.good()?, "vm\n");
        // It is nobody's template, and not removed by what may be meant as the beginning of an id.
        for line in [
            vec!["template", "rm", &digest],
            vec!["template", "verify", &digest],
            vec!["template", "inspect", &digest],
            vec!["run", "-d", "--template", &digest],
        ] {
            let came = imp.run(&line)?;
            assert_ne!(came.code, Some(0), "{line:?}");
            assert!(came.stderr.contains("no template"), "{line:?}: {}", came.stderr);
        }
        let beginning = digest.get("sha256:".len()..).and_then(|hex| hex.get(..8)).context("no digest")?;
        assert_eq!(imp.run(["rm", "-f", beginning])?.code, Some(1));
        imp.run(["resume", beginning])?.good()?;
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

#[test]
fn a_fork_while_files_are_copied_out_and_in_leaves_copies_that_are_whole_or_have_failed() -> anyhow::Result<()>
{
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        start(&imp)?;
        says(&imp, "vm", "first")?;
        let large = imp.folder().join("large");
        std::fs::write(&large, vec![7; 24 << 20])?;
        imp.run(["cp", "large", "vm:/large"])?.good()?;
        // Nobody reads it: it is under way until the fork.
        let out = imp.command(["cp", "vm:/large", "-"]).spawn()?;
        let into = imp.command(["cp", "large", "vm:/second"]).spawn()?;
        wait_until("a copy is under way", || {
            Ok(imp.run(["exec", "vm", "sh", "-c", "ls -A / | grep -c second"])?.stdout != "0\n")
        })?;
        imp.run(["fork", "--name", "child", "vm"])?.good()?;
        let (out, into) = (finish(out)?, finish(into)?);
        assert!(
            out.code != Some(0) || out.stdout.len() > 24 << 20,
            "{:?}: half a copy counts as one",
            out.code
        );
        let sum = |vm: &str, file: &str| {
            imp.run(["exec", vm, "md5sum", file])
                .map(|came| came.stdout.split(' ').next().unwrap_or_default().to_owned())
        };
        assert_eq!(sum("child", "/large")?, sum("vm", "/large")?);
        if into.code == Some(0) {
            assert_eq!(sum("vm", "/second")?, sum("vm", "/large")?);
        } else {
            assert!(into.stderr.starts_with("error: "), "{}", into.stderr);
        }
        // Copies work again, from both.
        for vm in ["vm", "child"] {
            imp.run(["cp", &format!("{vm}:/large"), &format!("{vm}-large")])?.good()?;
            assert!(
                std::fs::read(imp.folder().join(format!("{vm}-large")))? == std::fs::read(&large)?,
                "{vm}"
            );
        }
        imp.end()
    })
}
