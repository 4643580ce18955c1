//! What Imp says when something is missing or wrong: what it is, and what to do next.

use anyhow::Context as _;
use imp_testkit::imp::{Came, Imp, finish};
use imp_testkit::terminal;

use crate::DRIVER;

fn refused(imp: &Imp, line: &[&str], code: i32, said: &[&str]) -> anyhow::Result<Came> {
    let came = imp.run(line)?;
    assert_eq!(came.code, Some(code), "{line:?}: {}", came.stderr);
    for words in said {
        assert!(came.stderr.contains(words), "{line:?}: {words:?} is not in {}", came.stderr);
    }
    Ok(came)
}

#[test]
fn names_of_nothing_are_answered_with_how_to_list_what_there_is() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let verbs: [&[&str]; 9] = [
        &["logs", "nobody"],
        &["attach", "nobody"],
        &["stop", "nobody"],
        &["kill", "nobody"],
        &["rm", "nobody"],
        &["wait", "nobody"],
        &["inspect", "nobody"],
        &["top", "nobody"],
        &["port-forward", "nobody", "80"],
    ];
    for line in verbs {
        refused(&imp, line, 1, &["no VM is called \"nobody\"", "imp ps -a"])?;
    }
    refused(&imp, &["exec", "nobody", "true"], 125, &["no VM is called"])?;
    refused(&imp, &["image", "rm", "nothing"], 1, &["no image \"nothing\"", "imp image ls"])?;
    imp.end()
}

#[test]
fn a_wrong_command_line_is_no_exit_status_of_a_program() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let came = refused(&imp, &["run", "--memry", "1g", "x"], 125, &["--memory", "Usage: imp run [FLAGS]"])?;
    assert!(!came.stderr.contains("--data-dir"), "{}", came.stderr);
    refused(&imp, &["ps", "--al"], 2, &["--all"])?;
    refused(&imp, &["run", "-v", "data:/x", "image"], 125, &["./data"])?;
    refused(&imp, &["run", "-p", "70000", "image"], 125, &["ports from 1 to 65535"])?;
    refused(&imp, &["run", "-v", "/etc:/proc/x", "image"], 125, &["/proc/x", "any other path is free"])?;
    refused(&imp, &["run", "--stop-signal", "SIGFOO", "image"], 125, &["no signal", "SIGTERM"])?;
    refused(&imp, &["run", "--disk", "1m", "image"], 125, &["possible is 16 MiB"])?;
    imp.end()
}

#[test]
fn what_is_missing_on_the_machine_is_named_with_what_brings_it() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let run = ["run", "--network", "none", "imp.test/busybox", "true"];
    let with = |flag: &'static str, path: &'static str| [&[flag, path], run.as_slice()].concat();
    refused(
        &imp,
        &["run", "--kernel", "/no/kernel", "--network", "none", "imp.test/busybox"],
        125,
        &["/no/kernel"],
    )?;
    // Each with an owner of its own: what a command asks for is what it gets.
    refused(&imp, &with("--guest-agent", "/no/agent"), 125, &["/no/agent"])?;
    refused(&imp, &with("--qemu", "/no/qemu"), 125, &["/no/qemu"])?;
    std::fs::remove_file(imp.data().join("kernels"))?;
    refused(&imp, &run, 125, &["no guest kernel", "./dev setup"])?;
    refused(&imp, &["--data-dir", "/dev/null/data", "image", "ls"], 1, &["/dev/null/data"])?;
    refused(&imp, &["--settings", "/no/settings", "ps"], 1, &["cannot read the settings file /no/settings"])?;
    imp.end()
}

#[test]
fn a_doctor_names_what_it_tried() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    let checks: serde_json::Value = serde_json::from_str(&imp.run(["doctor", "-o", "json"])?.good()?)?;
    let state = |name: &str| {
        let check =
            checks.as_array()?.iter().find(|check| check.pointer("/name").is_some_and(|it| it == name))?;
        check.pointer("/state")?.as_str()
    };
    for name in ["places", "images", "qemu", "kernel", "agent"] {
        assert_eq!(state(name), Some("good"), "{name}: {checks}");
    }
    std::fs::remove_file(imp.data().join("kernels"))?;
    let came = imp.run(["doctor"])?;
    assert_eq!(came.code, Some(1));
    assert!(
        came.stdout.contains("BAD   kernel") && came.stdout.contains("repair: ./dev setup"),
        "{}",
        came.stdout
    );
    imp.end()
}

#[test]
fn what_is_listed_is_for_scripts_too_and_coloured_only_at_a_terminal() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let listings: [&[&str]; 5] =
        [&["ps"], &["image", "ls"], &["doctor"], &["version"], &["top", "--interval", "0.01"]];
    for line in listings {
        let text = imp.run(line.iter().chain(&["-o", "json"]))?.good()?;
        serde_json::from_str::<serde_json::Value>(&text).with_context(|| format!("{line:?}: {text}"))?;
        assert!(!imp.run(line)?.stdout.contains('\x1b'), "{line:?}");
    }
    let doctor = imp.command(["doctor"]);
    let screen = |command: &std::process::Command| finish(terminal::command(command)?.spawn()?);
    assert!(screen(&doctor)?.stdout.contains("\x1b[1;"));
    let mut plain = imp.command(["doctor"]);
    plain.env("NO_COLOR", "1");
    let came = screen(&plain)?;
    assert!(came.stdout.contains("qemu") && !came.stdout.contains('\x1b'), "{:?}", came.stdout);
    imp.end()
}

#[test]
fn completions_and_versions_need_no_owner() -> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    for shell in ["bash", "zsh", "fish"] {
        let script = imp.run(["completions", shell])?.good()?;
        assert!(script.contains("port-forward"), "{shell}");
    }
    assert_eq!(imp.run(["--version"])?.good()?, format!("imp {}\n", env!("CARGO_PKG_VERSION")));
    assert!(imp.run(["version"])?.good()?.contains("not running"));
    assert!(imp.run(["ps"])?.good()?.starts_with("ID "));
    assert!(!imp.socket().exists());
    imp.end()
}
