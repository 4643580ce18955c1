//! Children of VMs that are made of a snapshot themselves, of which only the changes are written.

use imp_runtime::{DriverChoice, Runtime, VmId};

use super::driver::{makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, exec};
use super::restore::{child, restored};
use super::template::{end, init, template};

/// All that is in the guest's memory and has a name.
async fn memory(runtime: &Runtime, id: &VmId) -> String {
    let (sums, code) = exec(runtime, id, "cd /dev/shm; md5sum *").await;
    assert_eq!(code, 0, "{sums}");
    sums
}

async fn write(runtime: &Runtime, id: &VmId, what: &str, files: &str) -> String {
    let script = format!(
        "for file in {files}; do yes {what} | head -c 5000000 >/dev/shm/$file; done; rm -f /dev/shm/gone"
    );
    assert_eq!(exec(runtime, id, &script).await.1, 0);
    memory(runtime, id).await
}

#[test]
fn each_child_has_the_memory_that_its_parent_had_then_over_generations_and_again_and_again() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let mut spec = template(host.spec("unused", &["sleep", "1000"]));
        spec.init =
            vec![init("for file in kept gone a b; do yes $file | head -c 3000000 >/dev/shm/$file; done")];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let parent = restored(&runtime, &made, child("parent")).await;
        let untouched = memory(&runtime, &parent).await;
        let first = forked(&runtime, &parent, &["first"]).await.remove(0);
        let changed = write(&runtime, &parent, "changed", "a").await;
        let second = forked(&runtime, &parent, &["second"]).await.remove(0);
        // What changed before the last snapshot and not since is there as well.
        let again = write(&runtime, &parent, "again", "b").await;
        let third = forked(&runtime, &parent, &["third"]).await.remove(0);
        let own = write(&runtime, &second, "own", "a c").await;
        let grandchild = forked(&runtime, &second, &["grandchild"]).await.remove(0);
        let last = forked(&runtime, &grandchild, &["last"]).await.remove(0);
        for (id, expected) in [
            (&first, &untouched),
            (&second, &own),
            (&third, &again),
            (&parent, &again),
            (&grandchild, &own),
            (&last, &own),
        ] {
            assert_eq!(memory(&runtime, id).await, *expected);
        }
        assert!(untouched != changed && changed != again && again != own);
        if matches!(crate::DRIVER, DriverChoice::Firecracker) {
            assert!(written(&host.vm(&parent)) < 64 << 20, "more than what has changed is written");
        }
        for id in [&first, &second, &third, &parent, &grandchild, &last] {
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}

/// Bytes on disk of the file of changes, somewhere below.
fn written(directory: &std::path::Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            bytes += written(&entry.path());
        } else if entry.file_name() == "memory.changes" {
            bytes += std::os::unix::fs::MetadataExt::blocks(&entry.metadata().unwrap()) * 512;
        }
    }
    bytes
}
