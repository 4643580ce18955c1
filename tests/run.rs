//! `imp run` is as easy as a container: output, input, exit status, signals, and nothing left behind.

use std::io::{BufRead, BufReader, Write};

use imp_testkit::imp::{Imp, finish, wait_until};
use imp_testkit::terminal;

const IMAGE: &str = "imp.test/busybox";

fn sh(script: &str) -> Vec<String> {
    ["run", "--rm", "--network", "none", IMAGE, "sh", "-c", script].map(str::to_owned).to_vec()
}

#[test]
fn output_and_exit_status_are_the_programs_own() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let came = imp.run(sh("echo out; echo err >&2; exit 7"))?;
    assert_eq!((came.code, came.stdout.as_str(), came.stderr.as_str()), (Some(7), "out\n", "err\n"));
    assert_eq!(imp.run(sh("kill -9 $$"))?.code, Some(137));
    imp.end()
}

#[test]
fn a_program_that_cannot_be_started_is_126_or_127_and_our_own_failure_125() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let run = |program: &str| imp.run(["run", "--rm", "--network", "none", IMAGE, program]);
    assert_eq!(run("no-such-program")?.code, Some(127));
    assert_eq!(run("/etc/passwd")?.code, Some(126));
    let came = imp.run(["run", "--pull", "never", "imp.test/nowhere", "true"])?;
    assert_eq!(came.code, Some(125), "{}", came.stderr);
    assert_eq!(imp.run(["run", "--no-such-flag", IMAGE])?.code, Some(125));
    imp.end()
}

#[test]
fn input_is_passed_on_whole_and_its_end_too() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let input: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let line = ["run", "--rm", "-i", "--network", "none", IMAGE, "sh", "-c", "wc -c; cat"];
    let came = imp.run_with_input(line, &input)?;
    assert_eq!(came.good()?.trim(), input.len().to_string());
    imp.end()
}

#[test]
fn output_of_many_megabytes_arrives_whole() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let came = imp.run(sh("head -c 5000000 /dev/zero | tr '\\0' x"))?;
    assert_eq!((came.code, came.stdout.len()), (Some(0), 5_000_000), "{}", came.stderr);
    imp.end()
}

#[test]
fn words_are_literal() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let odd = ["$HOME", "a \"b\"", "two\nlines", "*"];
    let line = ["run", "--rm", "--network", "none", "-e", "X=$HOME '\n", IMAGE, "sh", "-c"];
    let script = "printf '[%s]' \"$X\" \"$@\"";
    let came = imp.run(line.into_iter().chain([script, "sh"]).chain(odd))?;
    assert_eq!(came.good()?, "[$HOME '\n][$HOME][a \"b\"][two\nlines][*]");
    imp.end()
}

#[test]
fn a_signal_to_the_command_reaches_the_program() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    let mut child = imp.command(sh(script)).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no stdout"))?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    assert_eq!(line, "ready\n");
    let status = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
    assert!(status.success());
    line.clear();
    stdout.read_line(&mut line)?;
    assert_eq!(line, "caught\n");
    assert_eq!(finish(child)?.code, Some(3));
    imp.end()
}

#[test]
fn a_signal_before_the_program_has_started_takes_the_vm_away_again() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
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
fn what_is_copied_in_is_there_and_what_is_read_only_cannot_be_written() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let source = imp.folder().join("source");
    std::fs::create_dir(&source)?;
    std::fs::write(source.join("file"), "from here\n")?;
    let volume = format!("{}:/in:ro", source.display());
    let script = "cat /in/file /etc/one /new/two; touch /in/new 2>/dev/null && echo written; \
        echo more >> /etc/one && echo written; echo more >> /new/two && cat /new/two";
    let files = ["-v", "./source/file:/etc/one:ro", "-v", "./source/file:/new/two"];
    let line = ["run", "--rm", "--network", "none", "-v", &volume].into_iter().chain(files);
    let came = imp.run(line.chain([IMAGE, "sh", "-c", script]))?;
    let expected = "from here\nfrom here\nfrom here\nfrom here\nmore\n";
    assert_eq!(came.stdout, expected, "{}", came.stderr);
    assert_eq!(std::fs::read_to_string(source.join("file"))?, "from here\n");
    assert_eq!(std::fs::read_dir(&source)?.count(), 1);
    imp.end()
}

#[test]
fn one_vm_destroys_neither_the_image_nor_another_vm() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    imp.run(sh("rm -rf / 2>/dev/null; true"))?;
    assert_eq!(imp.run(sh("echo alive"))?.good()?, "alive\n");
    imp.end()
}

#[test]
fn a_vm_with_rm_is_gone_when_its_program_has_ended() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    imp.run(sh("true"))?.good()?;
    wait_until("no VM is listed", || Ok(imp.run(["ps", "-aq"])?.good()?.is_empty()))?;
    imp.end()
}

#[test]
fn a_reader_that_goes_away_ends_the_program() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
    let mut child = imp.command(["run", "--rm", "--network", "none", IMAGE, "yes"]).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no stdout"))?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    drop(stdout);
    let came = finish(child)?;
    assert_eq!((came.code, came.stderr.as_str()), (Some(141), ""));
    wait_until("no VM is listed", || Ok(imp.run(["ps", "-aq"])?.good()?.is_empty()))?;
    imp.end()
}

#[test]
fn timings_show_the_stages_of_the_vm_too() -> anyhow::Result<()> {
    let imp = Imp::with_busybox()?;
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
