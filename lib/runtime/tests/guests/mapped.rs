//! Files of a snapshot that lose what is mapped by VMs that run: these VMs fail, and nobody else.

use std::fs::File;
use std::path::Path;

use imp_protocol::causes::chain;
use imp_runtime::spec::{Child, Identity, WhenStopped};
use imp_runtime::status::{Failure, Outcome, State, VmmEnd};
use imp_runtime::{Digest, Error, NotActivated, Runtime};
use imp_storage::snapshots::Part;
use imp_storage::store::{Store, StoreOptions};

use super::driver::{makes_none, on_driver};
use super::host::{Host, exec, outcome, try_exec};
use super::restore::{child, restored};
use super::room::Small;
use super::template::{end, init, template};

const FILL: &str = "yes words | head -c 20000000 >/dev/shm/x";
const READ: &str = "md5sum </dev/shm/x; pidof sleep >/dev/null";

/// Of a host whose snapshots are wherever they are.
async fn truncated(host: &Host, runtime: &Runtime) {
    let build = async |hostname: &str| {
        let mut spec = template(host.spec("unused", &["sleep", "1000"]));
        spec.hostname = hostname.parse().unwrap();
        spec.init = vec![init(FILL)];
        runtime.template_build(spec, |_| {}).await.unwrap()
    };
    let (good, bad) = (build("good").await, build("bad").await);
    let lives = restored(runtime, &good, child("lives")).await;
    let kept = Child { when_stopped: WhenStopped::Keep, ..child("victim") };
    let victim = restored(runtime, &bad, kept).await;
    let waits = runtime.prepare(&bad, child("waits")).await.unwrap();
    let sums = exec(runtime, &lives, READ).await;
    assert_eq!(sums.1, 0, "{}", sums.0);

    if !shortened(&host.data(), &bad) {
        println!("this file system keeps anybody from changing it");
        runtime.activate(&waits, Identity::default()).await.unwrap();
        for id in [&lives, &victim, &waits] {
            assert_eq!(exec(runtime, id, READ).await, sums);
            runtime.kill(id).await.unwrap();
        }
        return runtime.remove(&victim).await.unwrap();
    }
    // It ends by itself as soon as it needs what is gone.
    let asked = try_exec(runtime, &victim, READ).await;
    assert!(asked.is_err(), "{asked:?}");
    let ended = outcome(runtime, &victim).await;
    let Outcome::Failed { failure: Failure::EndedWhileRunning { vmm }, .. } = &ended else {
        panic!("{ended:?}");
    };
    assert_eq!(*vmm, VmmEnd::MemoryCutShort);
    let failed = runtime.activate(&waits, Identity::default()).await.unwrap_err();
    let ended = matches!(&failed, Error::NotActivated { source: NotActivated::Ended { .. }, .. });
    assert!(ended, "{}", chain(&failed));
    let refused = runtime.prepare(&bad, child("never")).await.unwrap_err();
    assert!(chain(&refused).contains("memory"), "{}", chain(&refused));
    // Others do not notice.
    assert_eq!(exec(runtime, &lives, READ).await, sums);
    let next = restored(runtime, &good, child("next")).await;
    assert_eq!(exec(runtime, &next, READ).await, sums);
    for id in [&lives, &next] {
        assert_eq!(runtime.get(id).unwrap().state, State::Running);
        runtime.kill(id).await.unwrap();
    }
    runtime.remove(&victim).await.unwrap();
}

/// Truncates its memory, unless the file is sealed.
fn shortened(data: &Path, snapshot: &Digest) -> bool {
    let store = Store::open(data.join("images"), StoreOptions::default()).unwrap();
    let memory = store.snapshots().place(snapshot, Part::Memory);
    match File::options().write(true).open(memory) {
        Ok(memory) => memory.set_len(1 << 20).map(|()| true).unwrap(),
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
            false
        }
    }
}

#[test]
fn a_memory_file_that_is_truncated_under_vms_fails_them_alone() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        truncated(&host, &runtime).await;
        end(&host, runtime).await;
    });
}

#[test]
fn a_memory_file_in_memory_that_is_truncated_under_vms_fails_them_alone() {
    on_driver(async {
        let small = Small::new();
        let runtime = small.host.open().await;
        if makes_none(&runtime) {
            return small.end(runtime).await;
        }
        truncated(&small.host, &runtime).await;
        small.end(runtime).await;
    });
}
