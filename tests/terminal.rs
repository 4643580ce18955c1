//! The command's own side of a program that runs: its terminal, its words, its output, the table of `imp top`.

use std::fs::File;
use std::io::{Read, Write};

use anyhow::Context as _;
use imp_testkit::imp::{Imp, SharedVm, finish};
use imp_testkit::terminal;

use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn a_terminal_is_left_and_come_back_to() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let run = imp.command([
        "run",
        "-it",
        "--name",
        "web",
        "--network",
        "none",
        "--detach-keys",
        "ctrl-x,x",
        IMAGE,
        "sh",
    ]);
    let mut child = terminal::command(&run)?.spawn()?;
    let mut keys = child.stdin.take().context("no stdin")?;
    let mut screen = child.stdout.take().context("no stdout")?;
    keys.write_all(b"echo $((6 * 7)) $(tty)\n")?;
    until(&mut screen, "42 /dev/pts/")?;
    keys.write_all(b"\x18x")?;
    until(&mut screen, "detached; `imp attach web` goes back")?;
    assert_eq!(finish(child)?.code, Some(0));
    let attach = imp.command(["attach", "web"]);
    let mut child = terminal::command(&attach)?.spawn()?;
    let mut keys = child.stdin.take().context("no stdin")?;
    let mut screen = child.stdout.take().context("no stdout")?;
    keys.write_all(b"echo $((6 * 9))\n")?;
    until(&mut screen, "54")?;
    keys.write_all(b"exit 3\n")?;
    assert_eq!(finish(child)?.code, Some(3));
    imp.end()
}

#[test]
fn usage_is_shown_once_where_nobody_watches() -> anyhow::Result<()> {
    let imp = SharedVm::get(DRIVER)?;
    let table = imp.run(["top", "--interval", "0.1"])?.good()?;
    assert!(table.starts_with("ID ") && table.lines().count() == 2 && !table.contains('\x1b'), "{table:?}");
    let usage: serde_json::Value =
        serde_json::from_str(&imp.run(["top", "--interval", "0.1", "-o", "json", "vm"])?.good()?)?;
    let number = |field: &str| usage.pointer(&format!("/0/{field}")).and_then(serde_json::Value::as_u64);
    assert_eq!(number("memory_total_bytes"), Some(256 << 20), "{usage}");
    assert!(number("memory_used_bytes") > Some(0) && number("processes") > Some(0), "{usage}");
    assert_eq!(imp.run(["top", "nobody"])?.code, Some(1));
    imp.end()
}

#[test]
fn output_that_nobody_can_take_is_an_error() -> anyhow::Result<()> {
    let imp = SharedVm::get(DRIVER)?;
    let full = File::options().write(true).open("/dev/full")?;
    let child = imp.command(["exec", "vm", "echo", "x"]).stdout(full).spawn()?;
    let came = finish(child)?;
    assert!(
        came.code == Some(125) && came.stderr.contains("cannot write the program's output"),
        "{}",
        came.stderr
    );
    imp.end()
}

#[test]
fn a_program_that_cannot_be_started_is_126_or_127_and_our_own_failure_125() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let run = |program: &str| imp.run(["run", "--rm", "--network", "none", IMAGE, program]);
    assert_eq!(run("no-such-program")?.code, Some(127));
    assert_eq!(run("/etc/passwd")?.code, Some(126));
    let came = imp.run(["run", "--pull", "never", "imp.test/nowhere", "true"])?;
    assert_eq!(came.code, Some(125), "{}", came.stderr);
    assert_eq!(imp.run(["run", "--no-such-flag", IMAGE])?.code, Some(125));
    imp.end()
}

#[test]
fn words_are_literal() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let odd = ["$HOME", "a \"b\"", "two\nlines", "*"];
    let line = ["run", "--rm", "--network", "none", "-e", "X=$HOME '\n", IMAGE, "sh", "-c"];
    let script = "printf '[%s]' \"$X\" \"$@\"";
    let came = imp.run(line.into_iter().chain([script, "sh"]).chain(odd))?;
    assert_eq!(came.good()?, "[$HOME '\n][$HOME][a \"b\"][two\nlines][*]");
    imp.end()
}

fn until(screen: &mut impl Read, wanted: &str) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        let read = screen.read(&mut buffer)?;
        anyhow::ensure!(read > 0, "{wanted:?} did not come: {}", String::from_utf8_lossy(&seen));
        seen.extend(buffer.get(..read).unwrap_or_default());
    }
    Ok(())
}
