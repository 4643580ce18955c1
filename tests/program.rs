//! What can be seen of a program that runs in a VM, and sent to it: logs, attachments, signals, ports, usage.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use imp_testkit::imp::{Imp, SharedVm, finish, wait_until};

use super::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";
/// How long the next line of a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn detached(imp: &Imp, script: &str) -> anyhow::Result<()> {
    let line =
        ["run", "-d", "--name", "web", "--network", "none", "--stop-timeout", "1", IMAGE, "sh", "-c", script];
    imp.run(line)?.good().map(drop)
}

/// Lines of a command's stdout as they come; an empty one is the end.
fn lines(child: &mut Child) -> anyhow::Result<impl FnMut() -> anyhow::Result<String> + use<>> {
    let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    Ok(move || match lines.recv_timeout(PATIENCE) {
        Ok(line) => Ok(line),
        Err(mpsc::RecvTimeoutError::Disconnected) => Ok(String::new()),
        Err(mpsc::RecvTimeoutError::Timeout) => bail!("no further line within {PATIENCE:?}"),
    })
}

#[test]
fn a_log_is_shown_whole_in_part_and_as_it_grows() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        detached(
            &imp,
            "trap 'echo caught' USR1; trap 'echo bye; exit 4' TERM; echo one; echo two; echo wrong >&2; while :; do [ ! -e /go ] || { rm /go; echo on; }; sleep 0.1; done",
        )?;
        wait_until("all is logged", || Ok(imp.run(["logs", "web"])?.stderr == "wrong\n"))?;
        assert_eq!(imp.run(["logs", "web"])?.good()?, "one\ntwo\n");
        assert_eq!(imp.run(["logs", "--since", "2001-01-01T00:00:00Z", "web"])?.good()?, "one\ntwo\n");
        assert_eq!(imp.run(["logs", "--since", "2999-01-01T00:00:00Z", "web"])?.good()?, "");
        assert_eq!(imp.run(["logs", "--tail", "all", "--since", "2001-01-01", "web"])?.good()?, "one\ntwo\n");
        let stamped = imp.run(["logs", "-t", "web"])?.good()?;
        assert!(stamped.lines().all(|line| line.starts_with("20") && line.contains("Z ")), "{stamped}");
        assert!(imp.run(["logs", "--console", "web"])?.code == Some(0));
        let mut follower = imp.command(["logs", "-f", "web"]).spawn()?;
        let mut next = lines(&mut follower)?;
        assert_eq!((next()?, next()?), ("one".to_owned(), "two".to_owned()));
        imp.run(["kill", "-s", "USR1", "web"])?.good()?;
        assert_eq!(next()?, "caught");
        // One owner goes and another comes, and the follower stays.
        imp.kill_owner()?;
        imp.run(["exec", "web", "touch", "/go"])?.good()?;
        assert_eq!(next()?, "on");
        let waiter = imp.command(["wait", "web"]).spawn()?;
        imp.run(["stop", "web"])?.good()?;
        assert_eq!((next()?, next()?), ("bye".to_owned(), String::new()));
        assert_eq!(finish(follower)?.code, Some(0));
        assert_eq!(finish(waiter)?.good()?, "4\n");
        imp.end()
    })
}

#[test]
fn the_input_of_a_vm_in_the_background_is_there_for_one_after_the_other() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let script = "while read -r line; do echo got $line; done";
        let id =
            imp.run(["run", "-d", "-i", "--name", "web", "--network", "none", IMAGE, "sh", "-c", script])?;
        assert_eq!(imp.run(["ps", "-q"])?.good()?, id.good()?);
        for word in ["one", "two"] {
            let mut child = imp.command(["attach", "web"]).stdin(Stdio::piped()).spawn()?;
            let mut stdin = child.stdin.take().context("no stdin")?;
            stdin.write_all(format!("{word}\n").as_bytes())?;
            // The end of this input is not the end of the program's.
            drop(stdin);
            assert_eq!(lines(&mut child)?()?, format!("got {word}"));
            child.kill()?;
            child.wait()?;
        }
        // Nor is it the program's end that nobody reads this output any more.
        let mut child = imp.command(["attach", "web"]).stdin(Stdio::piped()).spawn()?;
        drop(child.stdout.take());
        child.stdin.as_mut().context("no stdin")?.write_all(b"three\n")?;
        assert_eq!(finish(child)?.code, Some(141));
        assert_eq!(imp.run(["exec", "web", "echo", "there"])?.good()?, "there\n");
        imp.end()
    })
}

#[test]
fn a_port_of_the_guest_is_reached_while_the_command_runs() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let serve = "mkdir -p /www && echo page > /www/index.html && httpd -p 8080 -h /www";
        imp.run(["exec", "-d", "vm", "sh", "-c", serve])?.good()?;
        let mut child = imp.command(["port-forward", "vm", ":8080"]).spawn()?;
        let line = lines(&mut child)?()?;
        let (address, rest) = line.split_once(' ').context("no address")?;
        assert_eq!(rest, "-> vm:8080");
        let mut answer = String::new();
        wait_until("the server answers", || {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            answer.clear();
            Ok(stream.read_to_string(&mut answer).is_ok() && answer.contains("200 OK"))
        })?;
        assert!(answer.ends_with("page\n"), "{answer}");
        child.kill()?;
        child.wait()?;
        assert!(TcpStream::connect(address).is_err());
        imp.end()
    })
}

#[test]
fn a_run_in_the_foreground_goes_on_when_the_owner_changes() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let script = "echo first; while [ ! -e /go ]; do sleep 0.1; done; echo second; exit 5";
        let mut child =
            imp.command(["run", "--name", "web", "--network", "none", IMAGE, "sh", "-c", script]).spawn()?;
        let mut next = lines(&mut child)?;
        assert_eq!(next()?, "first");
        imp.kill_owner()?;
        imp.run(["exec", "web", "touch", "/go"])?.good()?;
        assert_eq!(next()?, "second");
        assert_eq!(finish(child)?.code, Some(5));
        imp.end()
    })
}

#[test]
fn an_inspection_shows_the_machine_and_its_kernel() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = SharedVm::get(DRIVER)?;
        let vm = imp.inspect("vm")?;
        let text = |pointer: &str| {
            vm.pointer(pointer).and_then(|value| value.as_str()).unwrap_or_default().to_owned()
        };
        assert_eq!(
            (text("/name"), text("/state"), text("/driver/name")),
            ("vm".into(), "running".into(), DRIVER.name().into())
        );
        let release = imp.run(["exec", "vm", "uname", "-r"])?.good()?;
        assert_eq!(text("/kernel_release"), release.trim());
        let boot = "/proc/sys/kernel/random/boot_id";
        assert_ne!(std::fs::read_to_string(boot)?, imp.run(["exec", "vm", "cat", boot])?.good()?);
        let list = |name: &str| vm.get(name).and_then(|list| list.as_array()).cloned().context("no list");
        let (limits, not_enforced) = (list("limits")?, list("not_enforced")?);
        assert!(limits.len() + not_enforced.len() > 0, "{vm}");
        for limit in limits {
            let text = |field: &str| limit.get(field).and_then(|text| text.as_str()).context("no text");
            assert_eq!(std::fs::read_to_string(text("path")?)?.trim(), text("value")?);
        }
        imp.end()
    })
}
