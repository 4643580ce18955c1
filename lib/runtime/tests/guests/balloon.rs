//! Memory that a guest gives back while it runs, where the driver has balloons; elsewhere they are refused by name.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use imp_runtime::spec::{Balloon, Memory};
use imp_runtime::status::BalloonFacts;
use imp_runtime::{Runtime, VmId};

use super::driver::on_driver;
use super::fork::forked;
use super::host::{Host, exec, running, start, until};

const MIB: u64 = 1 << 20;

fn mib(mib: u64) -> Memory {
    Memory::from_bytes(mib * MIB).unwrap()
}

async fn own(runtime: &Runtime, id: &VmId) -> u64 {
    runtime.usage(id).await.unwrap().private_bytes
}

/// The files that hold the memory of snapshots.
fn memories(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.flat_map(|path| if path.is_dir() { memories(&path) } else { vec![path] });
    found.filter(|path| path.file_name().is_some_and(|name| name == "memory")).collect()
}

#[test]
fn a_guest_gives_memory_back_and_gets_it_again_and_so_does_its_child_or_a_balloon_is_refused() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        let mut spec = host.spec("parent", &["sleep", "1000"]);
        spec.memory = mib(160);
        spec.balloon = Balloon::With;
        if !runtime.has_balloons() {
            let refused = runtime.create(spec).await.unwrap_err().to_string();
            assert!(refused.contains("qemu") && refused.contains("--balloon"), "{refused}");
            return host.end(runtime).await;
        }
        let id = start(&runtime, spec).await;
        running(&runtime, &id).await;
        let empty = BalloonFacts { wanted_bytes: 0, given_bytes: 0 };
        until(&runtime, &id, |status| status.balloon == Some(empty)).await;
        // It had the memory, and needs it no more.
        assert_eq!(exec(&runtime, &id, "head -c 50m /dev/zero >/dev/shm/x; rm /dev/shm/x").await.1, 0);
        let before = own(&runtime, &id).await;
        let given = BalloonFacts { wanted_bytes: 56 * MIB, given_bytes: 56 * MIB };
        assert_eq!(runtime.set_memory(&id, mib(104)).await.unwrap(), given);
        assert_eq!(runtime.balloon(&id).await.unwrap(), Some(given));
        until(&runtime, &id, |status| status.balloon == Some(given)).await;
        let after = own(&runtime, &id).await;
        assert!(after + 20 * MIB < before, "{before} {after}");

        // A child begins with the balloon of its parent. What it gives back it takes from nobody.
        let child = forked(&runtime, &id, &["child"]).await.remove(0);
        until(&runtime, &child, |status| status.balloon == Some(given)).await;
        let memory = memories(&host.data().join("images/snapshots"));
        let seen = |path: &PathBuf| {
            let meta = std::fs::metadata(path).unwrap();
            (meta.blocks(), meta.mtime(), meta.mtime_nsec())
        };
        let whole: Vec<_> = memory.iter().map(seen).collect();
        assert_eq!(whole.len(), 1, "{memory:?}");
        assert_eq!(exec(&runtime, &child, "head -c 8m /dev/zero >/dev/shm/x").await.1, 0);
        let less = runtime.set_memory(&child, mib(96)).await.unwrap();
        assert!(less.given_bytes > given.given_bytes, "{less:?}");
        assert_eq!(runtime.set_memory(&child, mib(160)).await.unwrap(), empty);
        assert_eq!(memory.iter().map(seen).collect::<Vec<_>>(), whole);
        assert_eq!(exec(&runtime, &child, "head -c 8m /dev/zero | cmp - /dev/shm/x").await.1, 0);
        runtime.kill(&child).await.unwrap();

        // What it gets again it can use.
        assert_eq!(runtime.set_memory(&id, mib(160)).await.unwrap(), empty);
        assert_eq!(exec(&runtime, &id, "head -c 50m /dev/zero >/dev/shm/x && rm /dev/shm/x").await.1, 0);
        let too_much = runtime.set_memory(&id, mib(161)).await.unwrap_err();
        assert!(format!("{too_much:?}").contains("TooMuch"), "{too_much:?}");
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}
