//! A template is a machine that is ready, and VMs that are made of it go on from there, each as a machine of its own.

use std::process::Command;

use anyhow::{Context as _, ensure};
use imp_testkit::imp::Imp;
use serde_json::Value;

use super::promises::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

/// A template whose program holds a word in its memory.
pub(super) fn build(imp: &Imp, name: &str) -> anyhow::Result<String> {
    let script = "word=ready; while :; do [ ! -e /say ] || { word=$(cat /say); rm /say; }; echo $word >/new; mv /new /said; sleep 0.1; done";
    let line = ["template", "build", "--network", "none", "-m", "128m", "--init", "echo one >/prepared"];
    let wait = ["--wait-command", "grep -q ready /said", name, IMAGE, "--", "sh", "-c", script];
    Ok(imp.run(line.iter().chain(&wait))?.good()?.trim().to_owned())
}

pub(super) fn json(imp: &Imp, line: &[&str]) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&imp.run(line)?.good()?)?)
}

#[test]
fn vms_of_a_template_go_on_where_it_was_ready_and_are_machines_of_their_own() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let digest = build(&imp, "ready")?;
        // The same again is the same, and takes no step.
        assert_eq!(build(&imp, "again")?, digest);
        let listed = json(&imp, &["template", "ls", "-o", "json"])?;
        assert_eq!(listed.pointer("/0/names"), Some(&serde_json::json!(["again", "ready"])));
        assert_eq!(imp.run(["template", "verify", "ready"])?.good()?, format!("{digest}: good\n"));
        for name in ["one", "two"] {
            imp.run(["run", "-d", "--template", "ready", "--name", name, "-e", "WORD=given"])?.good()?;
            assert_eq!(imp.run(["exec", name, "cat", "/prepared", "/said"])?.good()?, "one\nready\n");
            assert_eq!(imp.run(["exec", name, "sh", "-c", "echo $WORD"])?.good()?, "given\n");
        }
        for own in ["/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"] {
            let of = |name: &str| imp.run(["exec", name, "cat", own])?.good();
            assert_ne!(of("one")?, of("two")?, "{own}");
        }
        assert_eq!(imp.inspect("one")?.get("made_of"), Some(&digest.clone().into()));
        let came = imp.run(["template", "rm", "ready"])?;
        assert_eq!(came.code, Some(1));
        assert!(came.stderr.contains("`imp rm -f") && came.stderr.contains("one"), "{}", came.stderr);
        imp.run(["rm", "-f", "one", "two"])?.good()?;
        assert_eq!(imp.run(["template", "rm", "ready"])?.good()?, format!("{digest}\n"));
        assert_eq!(imp.run(["template", "ls", "-q"])?.good()?, "");
        imp.end()
    })
}

#[test]
fn a_secret_is_in_the_guest_and_nowhere_on_the_host_and_is_forked_only_when_that_is_said()
-> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        build(&imp, "ready")?;
        let mut command =
            imp.command(["run", "-d", "--template", "ready", "--name", "vm", "--secret", "TOKEN"]);
        imp_testkit::imp::finish(command.env("TOKEN", "hunter2-hunter2").spawn()?)?.good()?;
        assert_eq!(imp.run(["exec", "vm", "sh", "-c", "echo $TOKEN"])?.good()?, "hunter2-hunter2\n");
        // Disks, and the memory of the template, among it.
        let holds = || -> anyhow::Result<Vec<String>> {
            let mut grep = Command::new("grep");
            let grep = grep.args(["-rlF", "--devices=skip", "hunter2-hunter2"]).arg(imp.folder()).output()?;
            Ok(String::from_utf8(grep.stdout)?.lines().map(str::to_owned).collect())
        };
        assert_eq!(holds()?, Vec::<String>::new());
        let inspected = imp.inspect("vm")?;
        assert!(!inspected.to_string().contains("hunter2"));
        assert_eq!(inspected.get("holds_secrets"), Some(&true.into()));
        for line in [["fork", "vm"], ["suspend", "vm"]] {
            let came = imp.run(line)?;
            assert_eq!(came.code, Some(1));
            assert!(came.stderr.contains("--with-secrets"), "{}", came.stderr);
        }
        imp.run(["fork", "--with-secrets", "--name", "child", "vm"])?.good()?;
        // The children's memory begins as that file.
        let held = holds()?;
        assert!(!held.is_empty() && held.iter().all(|file| file.ends_with("/memory")), "{held:?}");
        assert_eq!(imp.inspect("child")?.get("holds_secrets"), Some(&true.into()));
        imp.end()
    })
}

#[test]
fn a_build_that_fails_says_where_with_what_the_guest_said_and_leaves_nothing() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let build = |flag: &str, line: &str| {
            let flags = ["template", "build", "--network", "none", "--wait-timeout", "2", flag, line];
            imp.run(flags.iter().chain(&["broken", IMAGE, "--", "sleep", "1000"]))
        };
        for (flag, line) in [
            ("--init", "echo no such fitting >&2; exit 3"),
            ("--init", "echo no such fitting; exit 127"),
            ("--wait-command", "echo no such fitting; false"),
        ] {
            let came = build(flag, line)?;
            assert_eq!(came.code, Some(1));
            assert!(came.stderr.contains("no such fitting"), "{}", came.stderr);
            // What the machine's console says is somewhere else.
            let console = came.stderr.lines().find_map(|line| line.strip_prefix("its console is in "));
            let console = std::fs::read_to_string(console.context("no console")?)?;
            assert!(!console.trim().is_empty());
            for line in console.lines().filter(|line| !line.trim().is_empty()) {
                assert!(!came.stderr.contains(line), "{line:?} is shown: {}", came.stderr);
            }
        }
        assert_eq!(imp.run(["template", "ls", "-q"])?.good()?, "");
        imp_testkit::imp::wait_until("its machine is gone", || {
            Ok(imp.run(["ps", "-aq"])?.good()?.is_empty())
        })?;
        imp.end()
    })
}

#[test]
fn the_pages_of_a_template_are_there_once_for_all_its_vms() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let came = imp.run(["probe", "cow"])?;
        assert_eq!(came.code, Some(2));
        assert!(came.stdout.contains("HUSK-SETUP-LIMITATION"), "{}", came.stdout);
        build(&imp, "ready")?;
        let report = json(&imp, &["probe", "cow", "--template", "ready", "-n", "3", "-o", "json"])?;
        for truth in ["CoWSurvives", "DirtyPerVM"] {
            assert_eq!(report.get(truth), Some(&true.into()), "{report}");
        }
        let number = |name: &str| report.get(name).and_then(Value::as_u64).context("no number");
        ensure!(number("AggregatePhysical")? < number("NaiveSum")?, "{report}");
        assert_eq!(imp.run(["ps", "-aq"])?.good()?, "");
        // Called off it leaves none of its VMs.
        let mut probe = imp.command(["probe", "cow", "--template", "ready", "-n", "64"]).spawn()?;
        imp_testkit::imp::wait_until("it has made one", || Ok(!imp.run(["ps", "-q"])?.good()?.is_empty()))?;
        Command::new("kill").args(["-INT", &probe.id().to_string()]).status()?;
        assert_eq!(probe.wait()?.code(), Some(130));
        assert_eq!(imp.run(["ps", "-aq"])?.good()?, "");
        imp.end()
    })
}
