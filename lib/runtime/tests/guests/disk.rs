//! A disk of the host that fills up: an error of the one who writes, and of nobody else.

use std::fs;
use std::path::Path;

use imp_runtime::spec::DiskSize;
use imp_runtime::status::{Failure, Outcome, State};
use imp_testkit::small_disk::SmallDisk;

use super::driver::on_driver;
use super::host::{Host, exec, outcome, output, running, start, until};

const MIB: u64 = 1 << 20;

/// Room for scratch disks as long as nobody says otherwise.
const ROOM: &str = "1g";

/// The file system at `path` with no more room than these bytes.
pub(crate) fn leave(disk: &SmallDisk, path: &Path, bytes: u64) {
    let now = rustix::fs::statvfs(path).unwrap();
    let used = (now.f_blocks - now.f_bfree) * now.f_frsize;
    disk.resize(&(used + bytes).to_string()).unwrap();
}

#[test]
fn a_scratch_disk_that_finds_no_room_is_its_vms_failure_alone() {
    on_driver(async {
        let host = Host::new();
        let vms = host.data().join("vms");
        fs::create_dir_all(&vms).unwrap();
        let disk = SmallDisk::mount(&vms, ROOM).unwrap();
        let runtime = host.open().await;
        let other = start(&runtime, host.spec("other", &["sleep", "1000"])).await;
        running(&runtime, &other).await;
        // Admitted while there was room; and there is room for its record, but not for its disk.
        let late = runtime.create(host.spec("late", &["true"])).await.unwrap();
        leave(&disk, &vms, 16 << 10);
        runtime.start(&late).await.unwrap();
        let Outcome::Failed { failure, .. } = outcome(&runtime, &late).await else { panic!("it ran") };
        let Failure::Spawn { detail } = &failure else { panic!("{failure:?}") };
        assert!(detail.contains("cannot make the scratch disk"), "{detail}");
        assert!(detail.contains("is full; make room there"), "{detail}");
        assert!(!host.vm(&late).join("scratch.img").exists(), "half a disk is left");
        assert_eq!(exec(&runtime, &other, "echo untouched").await, ("untouched\n".into(), 0));

        disk.resize(ROOM).unwrap();
        runtime.remove(&late).await.unwrap();
        let again = start(&runtime, host.spec("late", &["true"])).await;
        assert_eq!(outcome(&runtime, &again).await, Outcome::Exited { code: 0 });
        runtime.kill(&other).await.unwrap();
        for id in [&other, &again] {
            runtime.remove(id).await.unwrap();
        }
        drop(runtime);
        drop(disk);
        host.assert_nothing_left(&[other, late, again]);
    });
}

#[test]
fn a_guest_that_fills_its_hosts_disk_is_told_so_and_no_other_vm_notices() {
    on_driver(async {
        let host = Host::new();
        let vms = host.data().join("vms");
        fs::create_dir_all(&vms).unwrap();
        let disk = SmallDisk::mount(&vms, ROOM).unwrap();
        let runtime = host.open().await;
        let mut spec = host.spec("writer", &["sleep", "1000"]);
        spec.scratch = DiskSize::from_bytes(128 * MIB).unwrap();
        let writer = start(&runtime, spec).await;
        let other = start(&runtime, host.spec("other", &["sleep", "1000"])).await;
        for id in [&writer, &other] {
            running(&runtime, id).await;
        }
        assert_eq!(exec(&runtime, &other, "echo kept >/kept; sync").await.1, 0);
        leave(&disk, &vms, 2 * MIB);
        // The disk that the guest sees has room; the one that it is kept on has not.
        let (said, code) =
            exec(&runtime, &writer, "dd if=/dev/urandom of=/filled bs=1M count=12 conv=fsync").await;
        assert!(code != 0 && said.contains("/filled"), "{said}");
        assert!(said.contains("I/O error") || said.contains("Input/output error"), "{said}");
        for id in [&writer, &other] {
            assert_eq!(exec(&runtime, id, "echo here").await, ("here\n".into(), 0));
            assert_eq!(runtime.get(id).unwrap().state, State::Running);
        }
        assert_eq!(exec(&runtime, &other, "cat /kept").await, ("kept\n".into(), 0));

        disk.resize(ROOM).unwrap();
        let again = "dd if=/dev/urandom of=/more bs=1M count=8 conv=fsync 2>/dev/null && echo room";
        assert_eq!(exec(&runtime, &other, again).await, ("room\n".into(), 0));
        for id in [&writer, &other] {
            runtime.kill(id).await.unwrap();
            runtime.remove(id).await.unwrap();
        }
        drop(runtime);
        drop(disk);
        host.assert_nothing_left(&[writer, other]);
    });
}

#[test]
fn what_found_no_room_in_the_log_is_known_to_the_next_owner() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let script = "until [ -e /full ]; do sleep 0.1; done; yes | head -c 300000; sleep 1000";
        let talker = runtime.create(host.shell("talker", script)).await.unwrap();
        let logs = host.vm(&talker).join("logs");
        fs::create_dir_all(&logs).unwrap();
        let disk = SmallDisk::mount(&logs, ROOM).unwrap();
        runtime.start(&talker).await.unwrap();
        running(&runtime, &talker).await;
        leave(&disk, &logs, 4 << 10);
        assert_eq!(exec(&runtime, &talker, "touch /full").await.1, 0);
        let lost = until(&runtime, &talker, |vm| vm.lost_output.is_some()).await.lost_output.clone().unwrap();
        drop(runtime);
        let runtime = host.open().await;
        let known = runtime.get(&talker).unwrap().lost_output.clone();
        assert!(known.as_ref().is_some_and(|known| known.bytes >= lost.bytes), "{lost:?}, {known:?}");
        runtime.kill(&talker).await.unwrap();
        outcome(&runtime, &talker).await;
        drop(disk);
        host.end(runtime).await;
    });
}

/// How many bytes a note in the log says to be missing; a note may follow the beginning of a line that was cut.
fn missing(line: &str) -> Option<u64> {
    let (_, note) = line.split_once("imp: ")?;
    let (bytes, _) = note.split_once(" bytes of output are missing here: No space left on device")?;
    bytes.parse().ok()
}

#[test]
fn output_that_finds_no_room_in_the_log_is_counted_there_and_the_program_goes_on() {
    on_driver(async {
        let host = Host::new();
        let vms = host.data().join("vms");
        fs::create_dir_all(&vms).unwrap();
        let disk = SmallDisk::mount(&vms, ROOM).unwrap();
        let runtime = host.open().await;
        let script = "echo begun; until [ -e /full ]; do sleep 0.1; done; yes | head -c 300000; touch /said; \
                      until [ -e /room ]; do sleep 0.1; done; echo again";
        let talker = start(&runtime, host.shell("talker", script)).await;
        running(&runtime, &talker).await;
        assert_eq!(exec(&runtime, &talker, "echo kept >/kept; sync").await.1, 0);
        leave(&disk, &vms, 0);
        assert_eq!(exec(&runtime, &talker, "touch /full; until [ -e /said ]; do sleep 0.1; done").await.1, 0);
        let lost = until(&runtime, &talker, |vm| vm.lost_output.is_some()).await.lost_output.clone().unwrap();
        assert!(lost.why.contains("No space left"), "{lost:?}");
        assert_eq!(runtime.get(&talker).unwrap().state, State::Running);

        disk.resize(ROOM).unwrap();
        assert_eq!(exec(&runtime, &talker, "touch /room").await.1, 0);
        assert_eq!(outcome(&runtime, &talker).await, Outcome::Exited { code: 0 });
        let said = output(&runtime, &talker).await;
        let lost = runtime.get(&talker).unwrap().lost_output.clone().unwrap().bytes;
        // Room may come and go while output is lost: each gap has its own note.
        let noted: u64 = said.lines().filter_map(missing).sum();
        assert_eq!(noted, lost, "{said}");
        assert!(said.starts_with("begun\n") && said.ends_with("again\n"), "{said}");
        runtime.remove(&talker).await.unwrap();
        drop(runtime);
        drop(disk);
        host.assert_nothing_left(&[talker]);
    });
}
