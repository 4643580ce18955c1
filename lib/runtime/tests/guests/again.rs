//! Snapshots of one VM, one after the other: the sixth costs what the first did.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use imp_runtime::spec::Memory;
use imp_runtime::{DriverChoice, WithSecrets};

use super::driver::{makes_none, on_driver};
use super::host::{Host, exec, running, start};
use super::template::end;

const SNAPSHOTS: usize = 6;

/// What the files of a directory take of the disk, in bytes.
fn taken(directory: &Path) -> u64 {
    fs::read_dir(directory).unwrap().flatten().map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn the_sixth_snapshot_of_a_vm_takes_at_most_half_as_much_again_as_the_first() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let mut spec = host.spec("parent", &["sleep", "1000"]);
        if crate::DRIVER == DriverChoice::Qemu {
            // Most of which is never used, and not written by a VMM that leaves holes.
            spec.memory = Memory::from_bytes(256 << 20).unwrap();
        }
        let parent = start(&runtime, spec).await;
        running(&runtime, &parent).await;
        let write = |number: usize| format!("yes {number} | head -c 24000000 | tee /dev/shm/x >/x; sync");
        let (mut rooms, mut times) = (Vec::new(), Vec::new());
        for number in 1..=SNAPSHOTS {
            assert_eq!(exec(&runtime, &parent, &write(number)).await.1, 0);
            let by = format!("snapshot-{number}");
            let made = runtime.fork_snapshot(&parent, WithSecrets::Refused, &by).await.unwrap();
            rooms.push(taken(&runtime.snapshot_directory(&made.snapshot)));
            times.push(made.times.freeze + made.times.paused + made.times.keep);
        }
        println!("{rooms:?} bytes, {times:?}");
        assert!(rooms[0] > 24_000_000, "{rooms:?}");
        assert!(rooms[SNAPSHOTS - 1] * 2 <= rooms[0] * 3, "{rooms:?}");
        for number in 1..=SNAPSHOTS {
            runtime.forget_fork(&format!("snapshot-{number}")).await.unwrap();
        }
        runtime.kill(&parent).await.unwrap();
        end(&host, runtime).await;
    });
}
