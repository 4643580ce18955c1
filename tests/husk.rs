//! A husk holds one machine that is asleep, wakes it for whoever may ask, and says no to all that makes no sense.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_testkit::husk::{Husk, answer, left_nothing};
use imp_testkit::imp::{Came, Imp, finish, wait_until};
use imp_testkit::machine;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::templates::{build, json};
use crate::DRIVER;

const SECRET: &str = "hunter2-hunter2";
/// Longer than any answer takes here.
const PATIENCE: Duration = Duration::from_secs(60);

/// The digits of a template's digest, and the directory in which it is.
pub(super) fn template(imp: &Imp) -> anyhow::Result<(String, String)> {
    let digest = build(imp, "ready")?.trim_start_matches("sha256:").to_owned();
    let directory = imp.data().join("images/snapshots").join(&digest);
    Ok((digest, directory.display().to_string()))
}

/// Runs `imp` on the workdir of a husk that was killed.
pub(super) fn imp_in(imp: &Imp, workdir: &std::path::Path, line: &[&str]) -> anyhow::Result<Came> {
    let mut command = imp.command(line);
    command.env("IMP_DATA_DIR", workdir).env("IMP_RUNTIME_DIR", workdir.join("run"));
    finish(command.spawn()?)
}

fn number(answer: &Value, pointer: &str) -> anyhow::Result<f64> {
    answer.pointer(pointer).and_then(Value::as_f64).with_context(|| format!("no {pointer} in {answer}"))
}

fn signal(answer: &Value, signal: Signal) -> anyhow::Result<()> {
    let pid = answer.get("vmm_pid").and_then(Value::as_i64).context("no VMM")?;
    Ok(kill_process(Pid::from_raw(i32::try_from(pid)?).context("no pid")?, signal)?)
}

#[test]
fn a_machine_is_prepared_and_activated_once_and_its_secret_stands_nowhere_on_the_host() -> anyhow::Result<()>
{
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let husk = Husk::start(&imp, "husk", &[])?;
    assert_eq!(std::fs::metadata(husk.socket())?.permissions().mode() & 0o777, 0o600);
    assert_eq!(husk.status("state")?, "new");
    let prepared = husk.granted("prepare", &["--snapshot-dir", &directory, "--expected-digest", &digest])?;
    assert_eq!(prepared.get("state"), Some(&"dormant".into()));
    for stage in ["verify_prepare", "rootfs_clone", "vmstate_restore", "prepare_total"] {
        number(&prepared, &format!("/stages/{stage}"))?;
    }
    assert!(number(&prepared, "/latency_ms")? >= number(&prepared, "/stages/prepare_total")?);
    let again = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    assert_eq!(husk.refused("prepare", &again)?, "already-prepared");

    let flags = ["--env", "WORD=given", "--secret-file", "-", "--vm-id", "husk"];
    let mut client = husk.command("activate", &flags)?.stdin(Stdio::piped()).spawn()?;
    client.stdin.take().context("no stdin")?.write_all(format!("TOKEN={SECRET}\n").as_bytes())?;
    let (code, activated) = answer(&finish(client)?)?;
    ensure!(code == Some(0), "{activated}\n{}", husk.said()?);
    assert_eq!(activated.get("state"), Some(&"active".into()));
    assert_eq!(activated.get("holds_secrets"), Some(&true.into()));
    for stage in ["resume", "guest_ready", "handshake", "repair_entropy", "repair_clock", "repair_identity"] {
        number(&activated, &format!("/stages/{stage}"))?;
    }
    let (code, again) = husk.ask("activate", &[])?;
    assert_eq!((code, again.get("already_active")), (Some(1), Some(&true.into())), "{again}");
    assert_eq!(again.get("code"), Some(&"already-active".into()));

    // What the guest itself wrote to its disk is the guest's.
    let records =
        Command::new("grep").args(["-rl", SECRET, "--exclude=scratch.img"]).arg(imp.folder()).output()?;
    assert_eq!(String::from_utf8(records.stdout)?, "");
    for file in ["cmdline", "environ"] {
        let seen = std::fs::read(format!("/proc/{}/{file}", husk.pid()))?;
        assert!(!String::from_utf8_lossy(&seen).contains(SECRET), "{file}");
    }
    assert!(!husk.said()?.contains(SECRET));

    // Without its husk the machine goes on, and the next one, or any owner of its workdir, has it.
    let workdir = husk.workdir();
    husk.kill()?;
    let exec = imp_in(&imp, &workdir, &["exec", "husk", "sh", "-c", "echo $WORD $TOKEN; cat /said"])?;
    assert_eq!(exec.good()?, format!("given {SECRET}\nready\n"));
    imp_in(&imp, &workdir, &["owner", "stop"])?.good()?;
    wait_until("the owner is gone", || Ok(!workdir.join("run/owner.sock").exists()))?;
    let husk = Husk::start(&imp, "husk", &[])?;
    assert_eq!(husk.status("state")?, "active");
    assert_eq!(husk.status("machine")?, *activated.get("machine").context("no id")?);
    // Its program is asked to end.
    let said = husk.end()?;
    assert!(said.contains("signal: 15"), "{said}");
    imp.end()
}

#[test]
fn a_husk_that_is_told_of_a_snapshot_serves_once_its_machine_is_dormant() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest, "--vm-id", "one"];
    let husk = Husk::start(&imp, "husk", &flags)?;
    assert_eq!(husk.status("state")?, "dormant");
    assert_eq!(husk.status("vm_id")?, "one");
    // As long as it has a machine of it.
    let came = imp.run(["template", "rm", "ready"])?;
    assert_eq!(came.code, Some(1), "{}", came.stderr);
    // An owner that comes takes back what is its own, and no more.
    imp.run(["owner", "stop"])?.good()?;
    imp.run(["ps"])?.good()?;
    assert_eq!(imp.run(["template", "rm", "ready"])?.code, Some(1));
    let wrong = "0".repeat(64);
    for (flags, code) in [
        (&["--vm-id", "two"][..], "other-machine"),
        (&["--expected-digest", &wrong], "other-snapshot"),
        (&["--snapshot-dir", &directory], "malformed"),
        (&["--snapshot-dir", "/nowhere", "--expected-digest", &digest], "no-snapshot"),
    ] {
        assert_eq!(husk.refused("activate", flags)?, code, "{flags:?}");
        assert_eq!(husk.status("state")?, "dormant");
    }
    husk.granted("activate", &["--snapshot-dir", &directory, "--expected-digest", &digest])?;
    husk.end()?;
    // A machine that sleeps on another one goes, when the husk that held it is gone.
    let husk = Husk::start(&imp, "husk", &flags)?;
    let machine = husk.status("machine")?;
    husk.kill()?;
    let line = ["template", "build", "--network", "none", "-m", "128m", "other", "imp.test/busybox"];
    let other = imp.run(line.iter().chain(&["--", "sleep", "100000"]))?.good()?.trim().to_owned();
    let directory = directory.replace(&digest, other.trim_start_matches("sha256:"));
    let others = ["--snapshot-dir", &*directory, "--expected-digest", &*other, "--vm-id", "one"];
    let husk = Husk::start(&imp, "husk", &others)?;
    assert_eq!(husk.status("snapshot")?, *other);
    assert_ne!(husk.status("machine")?, machine);
    husk.end()?;
    imp.run(["template", "rm", "ready"])?.good()?;
    // And one whose snapshot is not what was expected never serves.
    let husk = Husk::spawn(&imp, "husk", &flags)?;
    let workdir = husk.workdir();
    let (status, said) = husk.wait()?;
    assert!(status.code() == Some(1) && said.contains("not the directory of a snapshot"), "{status} {said}");
    left_nothing(&workdir)?;
    imp.end()
}

/// One connection: what is sent, and all that comes until it is closed.
fn exchange(husk: &Husk, sent: &[u8]) -> anyhow::Result<Vec<Value>> {
    let mut stream = UnixStream::connect(husk.socket())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // One that is refused before its end is not read to its end.
    let _ = stream.write_all(sent);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut came = Vec::new();
    let read = stream.read_to_end(&mut came);
    ensure!(read.is_ok() || !came.is_empty(), "no answer to {} bytes: {read:?}", sent.len());
    let lines = came.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| Ok(serde_json::from_slice(line)?)).collect()
}

#[test]
fn requests_that_are_malformed_too_long_late_or_out_of_order_are_refused_and_nothing_is_begun()
-> anyhow::Result<()> {
    let imp = Imp::new(DRIVER)?;
    // There is a store from here on.
    imp.run(["image", "ls"])?.good()?;
    let husk = Husk::start(&imp, "husk", &[])?;
    let long = vec![b'x'; (1 << 20) + 1];
    let absent = format!(r#"{{"snapshot_dir":"/nowhere","expected_digest":"{}"}}"#, "0".repeat(64));
    for (sent, expected) in [
        (&b"{\n"[..], "malformed"),
        (b"[]\n", "malformed"),
        (b"{\"surprise\":1}\n", "malformed"),
        (b"{\"snapshot_dir\":\"/s\"}\n", "malformed"),
        // Its end never comes.
        (b"{\"op\":\"status\"}\n{}", "malformed"),
        (&long, "too-long"),
        (b"{\"op\":\"spawn-vm\"}\n", "unknown-op"),
        (b"{\"token\":\"t\"}\n", "unsupported"),
        (b"{\"op\":\"status\",\"deadline_ms\":0}\n{}\n", "deadline"),
        (b"{}\n", "not-prepared"),
        (b"{\"op\":\"\"}\n{}\n", "not-prepared"),
        (b"{\"op\":\"fork-snapshot\"}\n{\"fork_id\":\"f\"}\n", "not-active"),
        (b"{\"op\":\"remove-fork-snapshot\"}\n{\"fork_id\":\"f\"}\n", "no-fork"),
        (format!("{absent}\n").as_bytes(), "no-snapshot"),
    ] {
        let shown = String::from_utf8_lossy(sent.get(..60).unwrap_or(sent)).into_owned();
        let answers = exchange(&husk, sent)?;
        let [answer] = answers.as_slice() else { anyhow::bail!("{shown}: {answers:?}") };
        assert_eq!(
            (answer.get("ok"), answer.get("code")),
            (Some(&false.into()), Some(&expected.into())),
            "{shown}"
        );
        number(answer, "/latency_ms")?;
        assert_eq!(husk.status("state")?, "new", "{shown}");
    }
    // One connection may ask again and again, and a client that is silent is no client's trouble.
    let silent = UnixStream::connect(husk.socket())?;
    let states = exchange(&husk, b"{\"op\":\"status\"}\n{}\n{\"op\":\"status\"}\n{}\n")?;
    assert_eq!(states.len(), 2, "{states:?}");
    drop(silent);
    // A request that does not come in time.
    let mut stream = UnixStream::connect(husk.socket())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"{\"op\":\"prepare\",\"deadline_ms\":50}\n")?;
    let mut came = String::new();
    stream.read_to_string(&mut came)?;
    assert!(came.contains("\"code\":\"deadline\""), "{came}");
    husk.end()?;
    imp.end()
}

#[test]
fn another_users_process_is_sent_away_before_it_is_heard() -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "only root can be another user: run this test as root");
    let imp = Imp::new(DRIVER)?;
    // There is a store from here on.
    imp.run(["image", "ls"])?.good()?;
    let husk = Husk::start(&imp, "husk", &[])?;
    // As if the socket and all above it were open.
    let program = imp.folder().join("client");
    std::fs::copy(machine::husk()?, &program)?;
    for path in [imp.folder().to_owned(), husk.workdir(), husk.socket(), program.clone()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))?;
    }
    let mut client = Command::new(&program);
    client.arg("status").arg("--control-socket").arg(husk.socket());
    let came = finish(client.uid(65534).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)?;
    let (code, answer) = answer(&came)?;
    assert_eq!((code, answer.get("code")), (Some(1), Some(&"stranger".into())), "{came:?}");
    assert!(answer.get("state").is_none(), "{answer}");
    husk.end()?;
    imp.end()
}

#[test]
fn a_guest_that_does_not_confirm_who_it_is_ends_the_machine_and_the_husk() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    // A machine id that can be neither replaced nor mounted over.
    let line = ["template", "build", "--network", "none", "-m", "128m", "--init"];
    let broken = [
        "rm -f /etc/machine-id; mkdir -p /etc/machine-id/x",
        "broken",
        "imp.test/busybox",
        "--",
        "sleep",
        "100000",
    ];
    let digest = imp.run(line.iter().chain(&broken))?.good()?;
    let digest = digest.trim().trim_start_matches("sha256:");
    let directory = imp.data().join("images/snapshots").join(digest).display().to_string();
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", digest];
    let husk = Husk::start(&imp, "husk", &flags)?;
    let vmm = husk.status("vmm_pid")?;
    let workdir = husk.workdir();
    let mut client = husk.command("activate", &["--secret", "TOKEN"])?;
    let (code, answer) = answer(&finish(client.env("TOKEN", SECRET).spawn()?)?)?;
    assert_eq!((code, answer.get("code")), (Some(1), Some(&"not-confirmed".into())), "{answer}");
    assert!(answer.get("error").is_some_and(|error| error.to_string().contains("identity")), "{answer}");
    let (status, said) = husk.wait()?;
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(!said.contains(SECRET));
    assert!(!PathBuf::from(format!("/proc/{vmm}")).exists(), "the VMM lives");
    left_nothing(&workdir)?;
    imp.end()
}

#[test]
fn an_activation_that_is_late_ends_the_machine_and_the_husk() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    let husk = Husk::start(&imp, "husk", &flags)?;
    let workdir = husk.workdir();
    let (_, status) = husk.ask("status", &[])?;
    // It will never answer.
    signal(&status, Signal::STOP)?;
    assert_eq!(husk.refused("activate", &["--deadline-ms", "500"])?, "deadline");
    let (status, said) = husk.wait()?;
    assert_eq!(status.code(), Some(1), "{said}");
    left_nothing(&workdir)?;
    imp.end()
}

#[test]
fn the_end_of_a_vmm_is_told_by_the_status_and_nothing_else_is_done_then() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    for is_active in [false, true] {
        let husk = Husk::start(&imp, "husk", &flags)?;
        if is_active {
            husk.granted("activate", &[])?;
        }
        let (code, status) = husk.ask("status", &[])?;
        assert_eq!(code, Some(0));
        signal(&status, Signal::KILL)?;
        wait_until("the status tells", || Ok(husk.status("state")? == "ended"))?;
        let (code, status) = husk.ask("status", &[])?;
        assert_eq!((code, status.get("code")), (Some(1), Some(&"ended".into())), "{status}");
        wait_until("it is known how", || Ok(husk.status("outcome")?.to_string().contains("signal")))?;
        for op in ["activate", "fork-snapshot"] {
            let flags: &[&str] = if op == "activate" { &[] } else { &["--fork-id", "f"] };
            assert_eq!(husk.refused(op, flags)?, "ended");
        }
        husk.end()?;
    }
    imp.end()
}

#[test]
fn a_machine_is_forked_into_other_husks_and_outlives_neither_its_own_nor_them() -> anyhow::Result<()> {
    let imp = Imp::with_busybox(DRIVER)?;
    let (digest, directory) = template(&imp)?;
    let flags = ["--snapshot-dir", &*directory, "--expected-digest", &*digest];
    let parent = Husk::start(&imp, "parent", &flags)?;
    assert_eq!(parent.refused("fork-snapshot", &["--fork-id", "one"])?, "not-active");
    let mut client = parent.command("activate", &["--secret", "TOKEN"])?;
    let (code, activated) = answer(&finish(client.env("TOKEN", SECRET).spawn()?)?)?;
    assert_eq!(code, Some(0), "{activated}");
    assert_eq!(parent.refused("fork-snapshot", &["--fork-id", "one"])?, "holds-secrets");
    let outside = imp.folder().join("elsewhere").display().to_string();
    let flags = ["--fork-id", "one", "--with-secrets", "--snapshot-dir", &*outside];
    assert_eq!(parent.refused("fork-snapshot", &flags)?, "malformed");
    // What is late is not done, and the machine goes on.
    let late = ["--fork-id", "late", "--with-secrets", "--deadline-ms", "10"];
    assert_eq!(parent.refused("fork-snapshot", &late)?, "deadline");
    wait_until("the late one is over", || Ok(parent.status("state")? == "active"))?;
    assert_eq!(parent.status("forks")?, Value::Null);
    let forked = parent.granted("fork-snapshot", &["--fork-id", "one", "--with-secrets"])?;
    for stage in ["freeze", "create_snapshot", "keep", "resume"] {
        number(&forked, &format!("/stages/{stage}"))?;
    }
    let link = forked.get("snapshot_dir").and_then(Value::as_str).context("no directory")?;
    assert_eq!(parent.refused("fork-snapshot", &["--fork-id", "one", "--with-secrets"])?, "fork-exists");
    assert_eq!(parent.status("forks")?, serde_json::json!(["one"]));
    assert_eq!(parent.status("state")?, "active");

    let child = Husk::start(&imp, "child", &[])?;
    assert_eq!(
        child.refused(
            "prepare",
            &["--snapshot-dir", link, "--fork-snapshot", "--block-network", "--expected-digest", &digest]
        )?,
        "snapshot-refused"
    );
    let activated = child.granted("activate", &["--snapshot-dir", link, "--fork-snapshot"])?;
    assert!(number(&activated, "/stages/prepare_total")? > 0.0);
    assert_ne!(activated.get("machine"), Some(&parent.status("machine")?));
    parent.granted("remove-fork-snapshot", &["--fork-id", "one"])?;
    assert_eq!(parent.refused("remove-fork-snapshot", &["--fork-id", "one"])?, "no-fork");
    // Nor the end of one that has not been removed.
    parent.granted("fork-snapshot", &["--fork-id", "two", "--with-secrets"])?;
    parent.end()?;

    let workdir = child.workdir();
    child.kill()?;
    let exec = imp_in(&imp, &workdir, &["exec", "husk", "sh", "-c", "echo $TOKEN; cat /said"])?;
    assert_eq!(exec.good()?, format!("{SECRET}\nready\n"));
    imp_in(&imp, &workdir, &["owner", "stop"])?.good()?;
    wait_until("the owner is gone", || Ok(!workdir.join("run/owner.sock").exists()))?;
    Husk::start(&imp, "child", &[])?.end()?;
    only_the_template_is_left(&imp, &digest)?;
    imp.end()
}

/// Of snapshots and of those who keep any.
pub(super) fn only_the_template_is_left(imp: &Imp, digest: &str) -> anyhow::Result<()> {
    let names = |directory: &str| -> anyhow::Result<Vec<String>> {
        let entries = std::fs::read_dir(imp.data().join("images").join(directory))?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    assert_eq!(names("snapshots")?, [digest]);
    assert_eq!(names("pins")?, Vec::<String>::new());
    let listed = json(imp, &["template", "ls", "-o", "json"])?;
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
    Ok(())
}
