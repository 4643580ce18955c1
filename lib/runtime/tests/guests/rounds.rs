//! The same thing many times: nothing adds up, and nothing gets lost.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use imp_runtime::status::{Outcome, State};
use imp_runtime::{DriverChoice, Runtime, VmId};
use imp_testkit::leftovers::{Snapshot, Thing};
use imp_testkit::machine::program;
use tokio::time::timeout;

use super::driver::{makes_none, on_driver};
use super::host::{Host, LONG, exec, running, start};
use super::restore::{child, restored};
use super::template::{end, template};

/// How many rounds it is to be: as many as this variable says.
const WANTED: &str = "IMP_TEST_ROUNDS";

/// Without that, few; where guests are emulated twice, fewer.
fn rounds() -> usize {
    let wanted = std::env::var(WANTED).ok().map(|number| number.parse().unwrap());
    wanted.unwrap_or(match crate::DRIVER {
        DriverChoice::Firecracker => 5,
        DriverChoice::Qemu | DriverChoice::Auto => 8,
    })
}

/// Of this process, below this directory.
fn open_files(directory: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|file| fs::read_link(file.path()).is_ok_and(|it| it.starts_with(directory))).count()
}

/// Of a VM that is gone, in directories in which `before` was.
fn left(before: &Snapshot, id: &VmId) -> Vec<String> {
    let expected = |thing: &Thing| match thing {
        // Those of other tests.
        Thing::Cgroup(path) => !path.ends_with(id.as_str()),
        Thing::NetworkDevice(name) | Thing::Table(name) => !name.contains(id.short()),
        // Of the template: what its VMs have needed first.
        Thing::File(path) => path.ends_with("working-set.json"),
        Thing::Process { .. } | Thing::Socket(_) | Thing::Mount(_) => false,
    };
    let new = before.new_since().unwrap();
    new.iter().filter(|thing| !expected(thing)).map(ToString::to_string).collect()
}

/// While the engine goes on.
async fn settled(what: &str, mut left: impl FnMut() -> Vec<String>) {
    let deadline = std::time::Instant::now() + LONG;
    loop {
        let left = left();
        if left.is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{what}: {left:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

async fn gone(runtime: &Runtime, id: &VmId) {
    // It may have gone meanwhile.
    let Ok(mut watch) = runtime.watch(id) else { return };
    while timeout(LONG, watch.changed()).await.expect("in time").is_ok() {}
}

#[test]
fn each_of_many_restores_is_a_machine_that_works_and_leaves_nothing() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let main = "echo word >/dev/shm/word; exec sleep 100000";
        let mut spec = template(host.shell("unused", main));
        spec.ready = vec![super::template::ready(super::template::command("test -s /dev/shm/word"), LONG)];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let mut seen = std::collections::BTreeSet::new();
        // What one leaves for all of them is there after the first.
        let mut before = None;
        for round in 0..=rounds() {
            let id = restored(&runtime, &made, child(&format!("vm-{round}"))).await;
            let own = "cat /dev/shm/word /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id && echo x >/x";
            let (text, code) = exec(&runtime, &id, own).await;
            assert_eq!(code, 0, "{round}: {text}");
            let mut lines = text.lines();
            assert_eq!(lines.next(), Some("word"), "{round}");
            assert!(lines.all(|line| seen.insert(line.to_owned())), "{round}: {text} is not its own");
            runtime.kill(&id).await.unwrap();
            gone(&runtime, &id).await;
            assert!(runtime.list().is_empty(), "{round}");
            match &before {
                None => before = Some((Snapshot::take(&[host.path()]).unwrap(), open_files(host.path()))),
                Some((before, files)) => {
                    settled(&format!("left by round {round}"), || left(before, &id)).await;
                    let more = || (*files..open_files(host.path())).map(|file| file.to_string()).collect();
                    settled(&format!("open after round {round}"), more).await;
                }
            }
        }
        assert_eq!(seen.len(), 2 * (rounds() + 1));
        end(&host, runtime).await;
    });
}

/// Writes, renames, links and removes all the time, with its own count of what must be there.
const LOAD: &str = "mkdir /load; n=0
    while [ ! -e /enough ]; do
        n=$((n + 1))
        d=/load/$((n % 20))
        mkdir -p $d && head -c $((n % 50 * 4000)) /dev/urandom >$d/new && mv $d/new $d/file
        ln -f $d/file $d/link; ln -sf file $d/symlink; echo $n >>/load/count
        [ $((n % 7)) -ne 0 ] || rm -r $d
        [ $((n % 11)) -ne 0 ] || sync
    done
    rm -rf /load/[0-9]*; wc -l </load/count >/counted; echo $n >>/counted; exit 6";

#[test]
fn many_pauses_under_load_leave_a_file_system_that_is_clean() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.shell("vm", LOAD)).await;
        running(&runtime, &id).await;
        let disk = File::open(scratch(&host, &id)).unwrap();
        for round in 0..rounds() {
            assert_eq!(
                exec(
                    &runtime,
                    &id,
                    "a=$(wc -l </load/count); until [ $(wc -l </load/count) -gt $a ]; do :; done"
                )
                .await
                .1,
                0,
                "{round}"
            );
            assert_eq!(runtime.pause(&id).await.unwrap().state, State::Paused, "{round}");
            assert_eq!(runtime.resume(&id).await.unwrap().state, State::Running, "{round}");
        }
        let (text, _) =
            exec(&runtime, &id, "dmesg | grep -i -e ext4.*error -e 'I/O error' -e overlay.*fail; true").await;
        assert_eq!(text, "");
        let enough = "touch /enough; until [ -e /counted ] && [ $(wc -l </counted) -eq 2 ]; do sleep 0.1; done; sort -u /counted | wc -l";
        // Its end may come first.
        if let Ok((counted, code)) = super::host::try_exec(&runtime, &id, enough).await {
            assert_eq!((counted.trim(), code), ("1", 0));
        }
        let mut watch = runtime.watch(&id).unwrap();
        let stopped = timeout(LONG, watch.wait_for(|vm| vm.state == State::Stopped)).await.expect("in time");
        assert_eq!(stopped.unwrap().outcome, Some(Outcome::Exited { code: 6 }));
        // The disk has no name any more, and its guest has put it down in order.
        let copy = host.path().with_extension("disk");
        std::io::copy(&mut &disk, &mut File::create(&copy).unwrap()).unwrap();
        check(&copy);
        fs::remove_file(&copy).unwrap();
        host.end(runtime).await;
    });
}

fn scratch(host: &Host, id: &VmId) -> std::path::PathBuf {
    let found = host.vm(id).join("scratch.img");
    assert!(found.exists(), "{}", found.display());
    found
}

fn check(disk: &Path) {
    let output = Command::new(program("e2fsck").unwrap()).arg("-fn").arg(disk).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
