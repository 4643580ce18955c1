//! Who pays for the pages that VMs of one template share.

use std::fs::{self, File};
use std::path::Path;

use imp_runtime::{DriverChoice, Runtime, VmId};
use imp_storage::snapshots::Part;
use imp_storage::store::{Store, StoreOptions};
use rustix::fs::Advice;

use super::driver::{makes_none, on_driver};
use super::host::{Host, exec, wait_until};
use super::restore::{child, restored};
use super::template::{end, init, template};

const LARGE: u64 = 40_000_000;
/// What a VM reads and writes of files of its own.
const OWN: u64 = 8 << 20;

/// Bytes of the page cache that a control group pays for.
fn pays_for(group: &Path) -> u64 {
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap();
    // The one of version 2, the other of version 1.
    let number = stat.lines().find_map(|line| line.strip_prefix("file ").or(line.strip_prefix("cache ")));
    number.unwrap().parse().unwrap()
}

/// Forgets what is in the page cache of a file; false: its file system keeps it there.
fn made_cold(file: &Path) -> bool {
    let file = File::open(file).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let length = file.metadata().unwrap().len() as usize;
    imp_sys::page_cache::resident(&file, length).unwrap().iter().all(|page| !page)
}

/// Reads all that the template's guest had in memory.
async fn pays(runtime: &Runtime, id: &VmId) -> (u64, u64) {
    assert_eq!(exec(runtime, id, "md5sum /dev/shm/large").await.1, 0);
    let status = runtime.get(id).unwrap();
    let limits = status.limits.iter().map(|limit| &limit.path);
    let limit = limits
        .into_iter()
        .find(|path| path.ends_with("memory.max") || path.ends_with("memory.limit_in_bytes"));
    let group = limit.expect("this host limits memory by a control group: run the test as root").parent();
    let group = group.unwrap();
    (pays_for(group), pays_for(&group.parent().unwrap().join("shared")))
}

#[test]
fn the_first_vm_of_a_cold_template_pays_for_its_own_pages_alone_whether_or_not_its_working_set_is_known() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        if crate::DRIVER == DriverChoice::Qemu {
            println!("not for QEMU: its group pays for files of its own, more than the limit here");
            return host.end(runtime).await;
        }
        let mut spec = template(host.spec("unused", &["sleep", "1000"]));
        spec.init = vec![init(&format!("head -c {LARGE} /dev/urandom >/dev/shm/large"))];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let store = Store::open(host.data().join("images"), StoreOptions::default()).unwrap();
        let memory = store.snapshots().place(&made, Part::Memory);
        let known = memory.with_file_name("working-set.json");
        for (name, knows) in [("first", false), ("second", true)] {
            if !made_cold(&memory) {
                println!("this file system has no page cache to be cold");
                break;
            }
            assert_eq!(known.exists(), knows);
            let id = restored(&runtime, &made, child(name)).await;
            let (own, shared) = pays(&runtime, &id).await;
            assert!(own < OWN, "{name}: the VM pays for {own} bytes of files");
            assert!(shared > LARGE, "{name}: the runtime pays for {shared} bytes");
            let found = async {
                while !known.exists() {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
            };
            tokio::time::timeout(super::host::LONG, found).await.expect("in time");
            runtime.kill(&id).await.unwrap();
        }
        wait_until("the set is small", || fs::metadata(&known).is_ok_and(|set| set.len() < 1 << 20));
        drop(store);
        end(&host, runtime).await;
    });
}
