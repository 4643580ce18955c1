//! Node VMs: what a test can do with one, what it cannot see or leave behind, and that Firecracker runs in it.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command as HostCommand, Stdio};
use std::sync::LazyLock;
use std::time::Duration;
use std::{env, fs, thread};

use imp_testkit::leftovers::Snapshot;
use imp_testkit::node::{self, Command, End, Error, Network, NodeVm};

/// One node for all tests that leave nothing in it; it ends with this process.
static NODE: LazyLock<NodeVm> = LazyLock::new(|| NodeVm::start().unwrap());

fn shell(script: &str) -> node::Output {
    NODE.exec(Command::shell(script)).unwrap()
}

#[test]
fn a_program_gets_its_arguments_environment_and_directory_and_gives_its_streams_and_exit_code() {
    let command = Command::new("sh")
        .arguments(["-c", r#"echo "$1|$NAME|$PWD"; echo bad >&2; exit 42"#, "sh", "a b"])
        .environment("NAME", "value")
        .directory("/usr/share");
    let output = NODE.exec(command).unwrap();
    assert_eq!(output.code(), Some(42));
    assert_eq!(output.text(), "a b|value|/usr/share\n");
    assert_eq!(output.stderr, b"bad\n");
    assert_eq!(shell("kill -9 $$").end, Some(End::Signalled(9)));
    assert_eq!(NODE.exec(Command::new("no-such-program")).unwrap().code(), Some(127));
    let nowhere = NODE.exec(Command::new("true").directory("/no/such/directory")).unwrap_err();
    assert!(nowhere.to_string().contains("/no/such/directory"), "{nowhere}");
}

#[test]
fn large_input_and_output_pass_whole_while_other_programs_run() {
    let bytes: Vec<u8> =
        (0..6_u32 << 20).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    thread::scope(|scope| {
        let copy = scope.spawn(|| NODE.exec(Command::new("cat").input(bytes.clone())).unwrap());
        assert_eq!(shell("echo beside").text(), "beside\n");
        let copied = copy.join().unwrap();
        assert_eq!(copied.code(), Some(0));
        assert!(copied.stdout == bytes, "{} bytes came back of {}", copied.stdout.len(), bytes.len());
    });
    // One that reads none of its input ends all the same.
    assert_eq!(NODE.exec(Command::new("true").input(bytes)).unwrap().code(), Some(0));
}

#[test]
fn a_hung_program_meets_its_deadline_with_all_that_it_started() {
    let script = "setsid sleep 6543 & echo started; sleep 6543";
    let error = NODE.exec(Command::shell(script).deadline(Duration::from_secs(8))).unwrap_err();
    let Error::Deadline { output, logs, .. } = &error else { panic!("{error}") };
    fs::remove_dir_all(logs.folder.as_ref().unwrap()).unwrap();
    assert_eq!((output.text().as_str(), &output.end), ("started\n", &Some(End::Signalled(9))));
    let left = shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
    assert!(!left.text().contains("sleep 6543"), "{}", left.text());
}

/// Else the timers of guests never fire where the kernel corrects the rate of its clock after KVM took note of it.
#[test]
fn a_node_is_told_the_rate_of_its_clock_and_its_kvm_tolerates_another() {
    // Linux corrects it by one per cent at the most, and this is of millionths.
    assert_eq!(shell("cat /sys/module/kvm/parameters/tsc_tolerance_ppm").text().trim(), "20000");
    let line = shell("cat /proc/cmdline").text();
    assert!(line.contains(" tsc_early_khz="), "{line}");
}

#[test]
fn what_a_program_leaves_running_holds_nothing_up() {
    let output = shell("sleep 5432 & echo done");
    assert_eq!((output.code(), output.text().as_str()), (Some(0), "done\n"));
    shell("kill $(pidof sleep)");
}

#[test]
fn a_running_program_can_be_waited_for_and_ends_when_it_is_dropped() {
    let mut server = NODE.spawn(Command::shell("echo ready; exec sleep 7654")).unwrap();
    server.wait_for("ready", Duration::from_secs(30)).unwrap();
    let late = server.wait_for("never", Duration::from_millis(10)).unwrap_err();
    assert!(matches!(late, Error::NotSaid { .. }), "{late}");
    drop(server);
    NODE.check(Command::shell("while grep -qs '[7]654' /proc/[0-9]*/cmdline; do sleep 0.05; done")).unwrap();
}

#[test]
fn nothing_of_the_host_is_visible_but_what_is_listed_and_nothing_there_changes() {
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("credentials"), "secret").unwrap();
    let shared = tempfile::tempdir().unwrap();
    fs::write(shared.path().join("file"), "host").unwrap();
    let node = NodeVm::builder().share(shared.path()).start().unwrap();

    let look = format!(
        "ls -d {0} {0}/credentials /etc/shadow 2>&1 || true; ls -A /root /home",
        secret.path().display()
    );
    let seen = node.exec(Command::shell(&look).environment("LC_ALL", "C")).unwrap().text();
    // What is shared by default may lie below a home: then the way to it is there, and nothing beside it.
    let shared_by_default =
        [std::env::current_exe().unwrap(), std::env::var_os("IMP_TEST_LAB").unwrap().into()];
    let on_the_way = |line: &str| {
        shared_by_default.iter().any(|path| path.components().any(|part| part.as_os_str() == line))
    };
    let hidden = |line: &str| {
        line.is_empty() || line.ends_with(':') || line.contains("No such file") || on_the_way(line)
    };
    assert!(seen.lines().all(hidden), "{seen}");

    let file = shared.path().join("file");
    let write = format!("cat {0}; echo node > {0}; cat {0}; rm -r /usr/share/doc", file.display());
    assert_eq!(node.check(Command::shell(&write)).unwrap().text(), "hostnode\n");
    assert_eq!(fs::read(file).unwrap(), b"host");
    assert!(Path::new("/usr/share/doc").exists());

    for refused in ["/", "/root", "/home/someone"] {
        let error = NodeVm::builder().share(refused).start().unwrap_err();
        assert!(matches!(error, Error::Share { .. }), "{error}");
    }
}

#[test]
fn files_and_directories_go_in_and_come_out() {
    let folder = tempfile::tempdir().unwrap();
    let host = folder.path().join("host");
    fs::create_dir_all(host.join("deep/er")).unwrap();
    fs::write(host.join("deep/er/program"), "#!/bin/sh\necho it runs\n").unwrap();
    fs::set_permissions(host.join("deep/er/program"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("er/program", host.join("deep/link")).unwrap();

    NODE.push(&host, Path::new("/data/in/it")).unwrap();
    assert_eq!(shell("/data/in/it/deep/link").text(), "it runs\n");
    NODE.write(Path::new("/data/in/it/more"), 0o600, b"more").unwrap();
    let back = folder.path().join("back");
    NODE.pull(Path::new("/data/in/it"), &back).unwrap();
    assert_eq!(fs::read(back.join("more")).unwrap(), b"more");
    assert_eq!(fs::read_link(back.join("deep/link")).unwrap(), Path::new("er/program"));
    assert!(NODE.pull(Path::new("/data/none"), &folder.path().join("none")).is_err());
}

#[test]
fn two_nodes_and_the_host_reach_each_other_and_the_host_has_no_new_device() {
    let devices = || {
        fs::read_dir("/sys/class/net").unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
    };
    let before = devices();
    let network = Network::new().unwrap();
    let start =
        |name: &'static str| NodeVm::builder().name(name).memory_mib(512).network(&network).start().unwrap();
    let (one, two) = thread::scope(|scope| {
        let one = scope.spawn(|| start("one"));
        let two = start("two");
        (one.join().unwrap(), two)
    });
    let other = two.address().unwrap();
    one.check(Command::shell(&format!("busybox ping -c 1 -W 30 {other}"))).unwrap();

    let server = network.within(|| TcpListener::bind((Network::HOST, 0)).unwrap()).unwrap();
    let port = server.local_addr().unwrap().port();
    let answer = thread::spawn(move || {
        let (mut client, from) = server.accept().unwrap();
        client.write_all(b"from the host").unwrap();
        from.ip()
    });
    let fetch = format!("busybox nc {} {port}", Network::HOST);
    assert_eq!(two.check(Command::shell(&fetch)).unwrap().text(), "from the host");
    assert_eq!(answer.join().unwrap(), other);

    let mut listener =
        two.spawn(Command::shell("busybox nc -l -p 7 -e echo from the node & echo up; wait")).unwrap();
    listener.wait_for("up", Duration::from_secs(30)).unwrap();
    two.check(Command::shell("until grep -q ':0007 ' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done"))
        .unwrap();
    let said = network.within(|| {
        let mut text = String::new();
        std::net::TcpStream::connect((other, 7)).unwrap().read_to_string(&mut text).unwrap();
        text
    });
    assert_eq!(said.unwrap(), "from the node\n");
    assert_eq!(devices(), before);
}

#[test]
fn the_command_passes_input_output_and_the_exit_code_through() {
    let mut lab = HostCommand::new(env!("CARGO_BIN_EXE_imp-lab"))
        .args([
            "--memory",
            "512",
            "sh",
            "-c",
            "cat; ls $FIRECRACKER $JAILER $KERNEL >/dev/null || exit 1; echo bad >&2; exit 3",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    lab.stdin.take().unwrap().write_all(b"in\n").unwrap();
    let output = lab.wait_with_output().unwrap();
    let streams = (output.stdout.as_slice(), output.stderr.as_slice());
    assert_eq!((output.status.code(), streams), (Some(3), (b"in\n".as_slice(), b"bad\n".as_slice())));
}

#[test]
fn a_node_that_crashes_fails_its_programs_and_leaves_its_console() {
    let node = NodeVm::builder().name("crash").memory_mib(512).start().unwrap();
    let error = node.exec(Command::shell("echo c > /proc/sysrq-trigger; sleep 1000")).unwrap_err();
    let Error::Ended { logs } = error else { panic!("{error}") };
    let console = fs::read_to_string(logs.folder.clone().unwrap().join("console.log")).unwrap();
    assert!(console.contains("Kernel panic") && logs.console.contains("sysrq"), "{console}");
    assert!(matches!(node.exec(Command::new("true")), Err(Error::Ended { .. } | Error::Silent { .. })));
    fs::remove_dir_all(logs.folder.unwrap()).unwrap();
}

/// This program again, with one of the tests below that are only parts of others.
fn part(name: &str, folder: &Path) -> HostCommand {
    let mut command = HostCommand::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env("TMPDIR", folder).env("IMP_TEST_LOGS", folder.join("logs")).env("IMP_LAB", "node");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_test_that_is_killed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let before = Snapshot::take(&[folder.path()]).unwrap();
    let mut victim = part("part_that_starts_a_node_and_waits", folder.path()).spawn().unwrap();
    let mut line = [0; 1 << 10];
    let mut said = Vec::new();
    let mut output = victim.stdout.take().unwrap();
    while !said.ends_with(b"the node runs\n") {
        let count = output.read(&mut line).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&line[..count]);
    }
    assert!(!before.new_since().unwrap().is_empty());
    victim.kill().unwrap();
    victim.wait().unwrap();
    before.wait_until_nothing_is_left(Duration::from_secs(30), |_| false).unwrap();
}

#[test]
#[ignore = "part of a_test_that_is_killed_leaves_nothing"]
fn part_that_starts_a_node_and_waits() {
    let node = NodeVm::builder().memory_mib(512).start().unwrap();
    // A node that listens would end by itself when it hears no more of its test.
    let stop = "kill -STOP $PPID; until grep -q '^State:.T' /proc/$PPID/status; do :; done; echo heard";
    let mut deaf = node.spawn(Command::shell(stop)).unwrap();
    deaf.wait_for("heard", Duration::from_secs(3)).unwrap_err();
    println!("the node runs");
    loop {
        thread::park();
    }
}

#[test]
fn a_test_that_fails_inside_fails_here_and_shows_what_it_said() {
    let folder = tempfile::tempdir().unwrap();
    let output = part("part_that_fails_inside", folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(101), "{text}");
    assert!(
        text.contains("said inside") && text.contains("left: 1") && text.contains("console and logs: "),
        "{text}"
    );
}

#[test]
#[ignore = "part of a_test_that_fails_inside_fails_here_and_shows_what_it_said"]
fn part_that_fails_inside() {
    node::inside(|| {
        println!("said inside");
        assert_eq!(fs::read_to_string("/etc/hostname").map_or(1, |_| 2), 2);
    });
}

#[test]
fn a_test_can_run_inside() {
    node::inside(|| {
        assert!(Path::new("/dev/kvm").exists());
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml").exists());
    });
}

mod guests {
    //! Firecracker and jailer, wherever guests run.

    use super::*;

    /// Clocks that are not measured against each other: below two layers of emulation they never agree.
    const BOOT: &str = "console=ttyS0 reboot=k panic=-1 pci=off quiet mitigations=off cryptomgr.notests \
        tsc=reliable no_timer_check i8042.noaux i8042.nomux i8042.dumbkbd i8042.nopnp 8250.nr_uarts=1 random.trust_cpu=on";

    /// Writes the files of a guest that says its kernel's name and powers off.
    fn guest(folder: &Path, seen_at: &Path) {
        use cpio::newc::{Builder, trailer};
        let busybox = fs::read(imp_testkit::machine::program("busybox").unwrap()).unwrap();
        let init = b"#!/busybox sh\n/busybox mount -t proc p /proc\n\
            echo guest $(/busybox sed 's/ (.*//' /proc/version)\n/busybox reboot -f\n";
        let mut archive = Vec::new();
        for (name, mode, content) in [
            ("dev", 0o040_755, &[] as &[u8]),
            ("proc", 0o040_755, &[]),
            ("busybox", 0o100_755, &busybox),
            ("init", 0o100_755, init),
        ] {
            let mut file = Builder::new(name).mode(mode).write(&mut archive, content.len() as u32);
            file.write_all(content).unwrap();
            file.finish().unwrap();
        }
        let console = Builder::new("dev/console").mode(0o020_600).rdev_major(5).rdev_minor(1);
        console.write(&mut archive, 0).finish().unwrap();
        trailer(&mut archive).unwrap();
        fs::write(folder.join("initramfs"), archive).unwrap();
        fs::copy(node::artefacts::kernel().unwrap(), folder.join("kernel")).unwrap();
        let settings = serde_json::json!({
            "boot-source": {
                "kernel_image_path": seen_at.join("kernel"),
                "initrd_path": seen_at.join("initramfs"),
                "boot_args": BOOT,
            },
            "drives": [],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 256 },
        });
        fs::write(folder.join("settings"), settings.to_string()).unwrap();
    }

    fn spoke(output: std::process::Output) {
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("guest Linux version 6."), "{text}");
    }

    #[test]
    fn firecracker_boots_a_guest() {
        node::inside(|| {
            let folder = tempfile::tempdir().unwrap();
            guest(folder.path(), folder.path());
            let firecracker = HostCommand::new(node::artefacts::firecracker().unwrap())
                .args(["--no-api", "--config-file"])
                .arg(folder.path().join("settings"))
                .stdin(Stdio::null())
                .output();
            spoke(firecracker.unwrap());
        });
    }

    #[test]
    fn the_jailer_boots_a_guest_in_its_chroot() {
        node::inside(|| {
            let folder = tempfile::tempdir_in("/var/tmp").unwrap();
            let root = folder.path().join("firecracker/one/root");
            fs::create_dir_all(&root).unwrap();
            guest(&root, Path::new("/"));
            let jailer = HostCommand::new(node::artefacts::jailer().unwrap())
                .args(["--id", "one", "--uid", "1000", "--gid", "1000", "--new-pid-ns", "--exec-file"])
                .arg(node::artefacts::firecracker().unwrap())
                .arg("--chroot-base-dir")
                .arg(folder.path())
                .args(["--cgroup-version", "2", "--cgroup", "pids.max=64", "--"])
                .args(["--no-api", "--config-file", "/settings"])
                .stdin(Stdio::null())
                .output();
            spoke(jailer.unwrap());
        });
    }
}
