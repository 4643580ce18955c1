//! Real guests: the real kernel, the real agent, a real QEMU.
//!
//! `IMP_TEST_DATA` names a data directory with an installed kernel, `IMP_GUEST_AGENT` the agent.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use imp_runtime::spec::{
    Arguments, BaseDisk, Bytes, Cpus, DiskSize, Environment, KernelChoice, Limits, MainProcess, Memory,
    NetworkMode, Stdin, VmSpec, WhenStopped,
};
use imp_runtime::status::{Failure, Outcome, State, VmStatus};
use imp_runtime::{Config, LogEnd, LogQuery, Runtime, VmId};
use tokio::time::timeout;

/// Far above what anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(240);

struct Host {
    directory: tempfile::TempDir,
    base: BaseDisk,
}

impl Host {
    fn new() -> Self {
        let installed = PathBuf::from(std::env::var_os("IMP_TEST_DATA").unwrap_or("/var/lib/imp".into()));
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        std::fs::create_dir_all(&data).unwrap();
        let kernels = installed.join("kernels");
        assert!(kernels.join("default").exists(), "no kernel in {}: run `./dev setup`", kernels.display());
        symlink(kernels, data.join("kernels")).unwrap();
        let base = base_disk(&data);
        Self { directory, base }
    }

    fn config(&self) -> Config {
        let agent =
            std::env::var_os("IMP_GUEST_AGENT").expect("IMP_GUEST_AGENT names the agent: run `./dev test`");
        Config {
            data: self.directory.path().join("data"),
            runtime: self.directory.path().join("run"),
            guest_agent: agent.into(),
            qemu: None,
        }
    }

    async fn open(&self) -> Runtime {
        Runtime::open(self.config()).await.unwrap()
    }

    fn spec(&self, name: &str, command: &[&str]) -> VmSpec {
        VmSpec {
            name: name.parse().unwrap(),
            base: self.base.clone(),
            cpus: Cpus::new(1).unwrap(),
            memory: Memory::from_bytes(256 << 20).unwrap(),
            scratch: DiskSize::from_bytes(256 << 20).unwrap(),
            main: MainProcess {
                arguments: Arguments::new(command.iter().copied()).unwrap(),
                environment: Environment::new(["PATH=/bin", "SECRET=hunter2"]).unwrap(),
                user: String::new(),
                working_directory: Bytes::default(),
                terminal: None,
                stdin: Stdin::Null,
                stop_signal: String::new(),
                open_files: None,
            },
            hostname: "guest".parse().unwrap(),
            network: NetworkMode::None,
            ports: Vec::new(),
            mounts: Vec::new(),
            labels: BTreeMap::new(),
            limits: Limits::default(),
            stop_grace: Duration::from_secs(5),
            kernel: KernelChoice::Default,
            when_stopped: WhenStopped::Keep,
        }
    }
}

/// A root file system with busybox, where the store keeps its disks.
fn base_disk(data: &Path) -> BaseDisk {
    let key = format!("sha256:{}", "ab".repeat(32));
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("bin")).unwrap();
    std::fs::copy("/bin/busybox", root.path().join("bin/busybox")).expect("apt-get install busybox-static");
    for name in ["sh", "sleep", "cat", "echo", "wget", "true"] {
        symlink("busybox", root.path().join("bin").join(name)).unwrap();
    }
    let store =
        imp_storage::store::Store::open(data.join("images"), imp_storage::store::StoreOptions::default());
    drop(store.unwrap());
    let path = data.join("images/disks").join(format!("{}.ext4", "ab".repeat(32)));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let made = std::process::Command::new("mke2fs")
        .stdout(std::process::Stdio::null())
        .args(["-q", "-t", "ext4", "-F", "-O", "^has_journal", "-d"])
        .arg(root.path())
        .arg(&path)
        .arg("16M")
        .status()
        .unwrap();
    assert!(made.success());
    BaseDisk { image: "busybox".into(), key, path }
}

async fn until(runtime: &Runtime, id: &VmId, state: State) -> Arc<VmStatus> {
    let mut watch = runtime.watch(id).unwrap();
    let reached = async {
        watch
            .wait_for(|status| status.state == state || status.state == State::Stopped)
            .await
            .map(|s| Arc::clone(&s))
    };
    let status = timeout(LONG, reached).await.expect("in time").expect("a VM");
    assert_eq!(status.state, state, "{:?}", status.outcome);
    status
}

async fn output(runtime: &Runtime, id: &VmId) -> String {
    let query = LogQuery { end: LogEnd::Now, ..LogQuery::default() };
    let mut reader = runtime.logs(id, query).await.unwrap();
    let mut bytes = Vec::new();
    while let Some(entry) = reader.next().await.unwrap() {
        bytes.extend(entry.data);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Nothing of a stopped VM is left but its record and its logs.
fn assert_clean(host: &Host, id: &VmId) {
    let data = host.directory.path().join("data/vms").join(id.as_str());
    assert!(!data.join("scratch.img").exists());
    assert!(!host.directory.path().join("run/vms").join(id.as_str()).exists());
    let mark = format!("imp-{id}");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let found = line.split(|b| *b == 0).any(|word| word == mark.as_bytes());
        assert!(!found, "{} still runs", entry.path().display());
    }
}

#[tokio::test]
async fn a_program_runs_in_a_guest_and_its_output_and_exit_code_come_out() {
    let host = Host::new();
    let runtime = host.open().await;
    let id = runtime
        .create(host.spec("one", &["sh", "-c", "echo $SECRET; echo error >&2; exit 7"]))
        .await
        .unwrap();
    runtime.start(&id).await.unwrap();
    let status = until(&runtime, &id, State::Stopped).await;
    assert_eq!(status.outcome, Some(Outcome::Exited { code: 7 }), "{:?}", runtime.console(&id).await);
    let output = output(&runtime, &id).await;
    assert!(output.contains("hunter2") && output.contains("error"), "{output}");
    let record =
        std::fs::read_to_string(host.directory.path().join(format!("data/vms/{id}/record.json"))).unwrap();
    assert!(!record.contains("hunter2"));
    assert_clean(&host, &id);
    runtime.remove(&id).await.unwrap();
    assert!(runtime.list().is_empty());
}

#[tokio::test]
async fn a_machine_that_cannot_boot_fails_at_once_with_its_last_words() {
    let host = Host::new();
    let kernel = host.directory.path().join("vmlinux");
    std::fs::write(&kernel, [&b"\x7fELF\x02\x01\x01"[..], &[0; 4096]].concat()).unwrap();
    let runtime = host.open().await;
    let mut spec = host.spec("broken", &["true"]);
    spec.kernel = KernelChoice::File(kernel);
    let id = runtime.create(spec).await.unwrap();
    runtime.start(&id).await.unwrap();
    let status = until(&runtime, &id, State::Stopped).await;
    let Some(Outcome::Failed { failure, console }) = &status.outcome else { panic!("{:?}", status.outcome) };
    assert!(matches!(failure, Failure::Spawn { .. } | Failure::EndedInBoot { .. }), "{failure:?}");
    assert!(!console.is_empty());
    assert_clean(&host, &id);
}

#[tokio::test]
async fn a_vm_outlives_its_owner_and_the_next_one_takes_it_over() {
    let host = Host::new();
    let runtime = host.open().await;
    let id = runtime.create(host.spec("long", &["sh", "-c", "echo before; sleep 1000"])).await.unwrap();
    runtime.start(&id).await.unwrap();
    let before = until(&runtime, &id, State::Running).await;
    drop(runtime);
    let runtime = host.open().await;
    let mut watch = runtime.watch(&id).unwrap();
    assert_eq!(watch.borrow_and_update().vmm_pid, before.vmm_pid);
    timeout(LONG, async {
        while runtime.connection(&id).await.is_err() {
            watch.changed().await.unwrap();
            assert_ne!(watch.borrow().state, State::Stopped, "{:?}", watch.borrow().outcome);
        }
    })
    .await
    .unwrap();
    let query = LogQuery { end: LogEnd::Follow, ..LogQuery::default() };
    let mut log = runtime.logs(&id, query).await.unwrap();
    let entry = timeout(LONG, log.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(entry.data, b"before\n");
    let status = runtime.stop(&id, None).await.unwrap();
    assert_eq!(
        status.outcome,
        Some(Outcome::Signalled { signal: 15, out_of_memory: false, timed_out: false })
    );
    assert_eq!(timeout(LONG, log.next()).await.unwrap().unwrap(), None);
    assert_clean(&host, &id);
}

#[tokio::test]
async fn an_owner_that_goes_while_a_vm_boots_leaves_nothing_for_the_next() {
    let host = Host::new();
    let runtime = host.open().await;
    let id = runtime.create(host.spec("booting", &["true"])).await.unwrap();
    runtime.start(&id).await.unwrap();
    let mut watch = runtime.watch(&id).unwrap();
    timeout(LONG, watch.wait_for(|status| status.vmm_pid.is_some())).await.unwrap().unwrap();
    drop(watch);
    drop(runtime);
    let runtime = host.open().await;
    let status = until(&runtime, &id, State::Stopped).await;
    assert!(
        matches!(status.outcome, Some(Outcome::Failed { failure: Failure::OwnerGone, .. })),
        "{:?}",
        status.outcome
    );
    assert_clean(&host, &id);
}

#[tokio::test]
async fn a_killed_vmm_is_seen_at_once_and_cleaned_up_after() {
    let host = Host::new();
    let runtime = host.open().await;
    let id = runtime.create(host.spec("victim", &["sleep", "1000"])).await.unwrap();
    runtime.start(&id).await.unwrap();
    let pid = until(&runtime, &id, State::Running).await.vmm_pid.unwrap();
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let status = until(&runtime, &id, State::Stopped).await;
    assert!(
        matches!(status.outcome, Some(Outcome::Failed { failure: Failure::EndedWhileRunning { .. }, .. })),
        "{:?}",
        status.outcome
    );
    assert_clean(&host, &id);
}
