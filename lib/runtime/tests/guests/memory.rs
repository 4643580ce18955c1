//! The memory of VMs on their host: what each takes, and what happens to one that takes more than it may.

use std::fs;
use std::path::PathBuf;

use imp_runtime::status::{Failure, Outcome, VmStatus, VmmEnd};

use super::driver::on_driver;
use super::host::{Host, exec, outcome, running, start, try_exec};

/// The file of the VM's memory limit, and how much of it is used.
fn memory_limit(status: &VmStatus) -> (PathBuf, u64) {
    let limits = status.limits.iter().map(|limit| &limit.path);
    let limit = limits
        .into_iter()
        .find(|path| path.ends_with("memory.max") || path.ends_with("memory.limit_in_bytes"));
    let limit = limit.expect("this host limits memory by a control group: run the test as root").clone();
    let used = if limit.ends_with("memory.max") { "memory.current" } else { "memory.usage_in_bytes" };
    let used = fs::read_to_string(limit.with_file_name(used)).unwrap();
    (limit, used.trim().parse().unwrap())
}

#[test]
fn a_vm_that_needs_more_memory_than_its_limit_ends_with_that_reason_and_alone() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let greedy = start(&runtime, host.spec("greedy", &["sleep", "1000"])).await;
        let other = start(&runtime, host.spec("other", &["sleep", "1000"])).await;
        running(&runtime, &other).await;
        let (limit, used) = memory_limit(&*running(&runtime, &greedy).await);
        let lowered = (used + (16 << 20)) >> 20 << 20;
        fs::write(&limit, lowered.to_string()).unwrap();
        // The guest has the memory, its host does not let it.
        let eating = try_exec(&runtime, &greedy, "dd if=/dev/zero of=/tmp/large bs=1M count=60; sync; cat");
        assert!(eating.await.is_err());
        let ended = outcome(&runtime, &greedy).await;
        let Outcome::Failed { failure, .. } = &ended else { panic!("{ended:?}") };
        let expected = Failure::EndedWhileRunning { vmm: VmmEnd::OutOfMemory { limit_bytes: lowered } };
        assert_eq!(*failure, expected);
        assert!(failure.to_string().contains(&format!("{} MiB", lowered >> 20)), "{failure}");
        assert_eq!(exec(&runtime, &other, "echo untouched").await, ("untouched\n".into(), 0));
        runtime.kill(&other).await.unwrap();
        host.end(runtime).await;
    });
}

#[test]
fn memory_that_a_guest_takes_is_its_vms_own() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(&runtime, host.spec("guest", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        let before = runtime.usage(&id).await.unwrap();
        assert_eq!(before.private_bytes + before.shared_bytes, before.resident_bytes, "{before:?}");
        assert!(before.shared_bytes > 0 && before.proportional_bytes < before.resident_bytes, "{before:?}");
        assert_eq!(
            exec(&runtime, &id, "dd if=/dev/urandom of=/tmp/large bs=1M count=24 2>/dev/null").await.1,
            0
        );
        let after = runtime.usage(&id).await.unwrap();
        let grown = after.private_bytes.saturating_sub(before.private_bytes);
        // Some of it takes pages that the guest had before.
        assert!(grown > 8 << 20, "{before:?} {after:?}");
        // It began without a balloon.
        let refused = runtime.set_memory(&id, "100m".parse().unwrap()).await.unwrap_err();
        let why = std::error::Error::source(&refused).unwrap().to_string();
        assert!(why.contains("--balloon"), "{why}");
        assert_eq!(runtime.balloon(&id).await.unwrap(), None);
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}
