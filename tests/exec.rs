//! `imp exec` runs further programs in a VM.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use imp_testkit::imp::{Imp, SharedVm, finish, wait_until};

use super::driver::on_driver;
use crate::DRIVER;

#[test]
fn output_input_and_exit_status_are_the_programs_own() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let came = imp.run(["exec", "vm", "sh", "-c", "echo out; echo err >&2; exit 9"])?;
        assert_eq!((came.code, came.stdout.as_str(), came.stderr.as_str()), (Some(9), "out\n", "err\n"));
        assert_eq!(imp.run_with_input(["exec", "-i", "vm", "cat"], b"typed")?.good()?, "typed");
        assert_eq!(imp.run(["exec", "vm", "no-such-program"])?.code, Some(127));
        assert_eq!(imp.run(["exec", "vm", "sh", "-c", "kill -15 $$"])?.code, Some(143));
        imp.end()
    })
}

#[test]
fn user_directory_and_variables_are_set() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let script = "id -u; pwd; echo $X";
        let came =
            imp.run(["exec", "-u", "1000", "-w", "/tmp", "-e", "X=$y", "vm", "--", "sh", "-c", script])?;
        assert_eq!(came.good()?, "1000\n/tmp\n$y\n");
        imp.end()
    })
}

#[test]
fn a_program_whose_time_is_up_is_killed() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let came = imp.run(["exec", "--timeout", "500ms", "vm", "sleep", "100"])?;
        assert_eq!(came.code, Some(137), "{}", came.stderr);
        assert!(came.stderr.contains("time was up"), "{}", came.stderr);
        imp.end()
    })
}

#[test]
fn a_program_whose_command_is_killed_is_killed_with_all_it_started() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let mut child = imp.command(["exec", "vm", "sh", "-c", "sleep 777 & sleep 778"]).spawn()?;
        let sleepers = || -> anyhow::Result<usize> {
            let listed = imp.run(["exec", "vm", "ps"])?.good()?;
            Ok(listed.lines().filter(|line| line.contains("sleep 77")).count())
        };
        wait_until("both run", || Ok(sleepers()? >= 2))?;
        child.kill()?;
        child.wait()?;
        wait_until("none runs", || Ok(sleepers()? == 0))?;
        imp.end()
    })
}

#[test]
fn a_signal_overtakes_input_that_the_program_does_not_read() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let line = ["exec", "-i", "vm", "sh", "-c", "echo ready; sleep 1000"];
        let mut child = imp.command(line).stdin(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        let mut stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        assert_eq!(line, "ready\n");
        let taken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&taken);
        let writer = std::thread::spawn(move || {
            while let Ok(written) = stdin.write(&[0; 4096]) {
                count.fetch_add(written, Ordering::Relaxed);
            }
        });
        // More than the guest's pipe and all that waits before it.
        wait_until("input waits", || Ok(taken.load(Ordering::Relaxed) > 384 << 10))?;
        let status = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
        assert!(status.success());
        let came = finish(child)?;
        assert_eq!(came.code, Some(143), "{}", came.stderr);
        assert!(writer.join().is_ok());
        imp.end()
    })
}

#[test]
fn what_is_not_said_is_as_the_vms_own_program_has_it() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let line = [
            "run",
            "-d",
            "--name",
            "vm",
            "--network",
            "none",
            "-u",
            "app",
            "-w",
            "/srv",
            "-e",
            "A=main",
            "-e",
            "B=b",
            "-p",
            "127.0.0.1::80",
        ];
        imp.run(line.into_iter().chain(["imp.test/busybox", "sleep", "100000"]))?.good()?;
        let script = "id -un; pwd; echo $A $B $FIXTURE";
        assert_eq!(
            imp.run(["exec", "-e", "A=exec", "vm", "sh", "-c", script])?.good()?,
            "app\n/srv\nexec b busybox\n"
        );
        assert_eq!(
            imp.run(["exec", "-u", "0", "-w", "/", "vm", "sh", "-c", "id -u; pwd"])?.good()?,
            "0\n/\n"
        );
        // A VM that has stopped says so, in one sentence.
        let ports = |imp: &Imp| Ok::<_, anyhow::Error>(imp.inspect("vm")?.pointer("/ports/0").is_some());
        assert!(ports(&imp)?);
        let mut forward = imp.command(["port-forward", "vm", ":80"]).spawn()?;
        let mut first = [0; 1];
        forward.stdout.as_mut().context("no stdout")?.read_exact(&mut first)?;
        imp.run(["kill", "vm"])?.good()?;
        let came = finish(forward)?;
        assert_eq!(
            (came.code, came.stderr.as_str()),
            (Some(1), "error: vm has stopped, and its ports with it\n")
        );
        assert!(!ports(&imp)?);
        let stopped = "error: vm has stopped, and a VM runs only once: start another one with `imp run`, or see `imp logs vm`\n";
        let came = imp.run(["exec", "vm", "true"])?;
        assert_eq!((came.code, came.stderr.as_str()), (Some(125), stopped));
        let came = imp.run(["port-forward", "vm", ":80"])?;
        assert_eq!((came.code, came.stdout.as_str(), came.stderr.as_str()), (Some(1), "", stopped));
        imp.end()
    })
}
