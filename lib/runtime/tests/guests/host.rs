//! One machine's worth of Imp for a test: directories of its own, a small disk, and the check that nothing is left.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{ExecInput, ProcessSpec, exec_input, exec_output, exit_status};
use imp_runtime::spec::{
    Arguments, Balloon, BaseDisk, BridgeSettings, BridgeWishes, Bytes, Cpus, DiskSize, Environment,
    KernelChoice, Limits, MainProcess, Memory, NetworkMode, Stdin, VmSpec, WhenStopped,
};
use imp_runtime::status::{Outcome, State, VmStatus};
use imp_runtime::{Config, DriverChoice, LogEnd, LogQuery, Runtime, VmId};
use imp_storage::store::{Store, StoreOptions};
use imp_testkit::leftovers::{Snapshot, Thing};
use imp_testkit::{machine, node};
use tokio::time::timeout;

/// Far above what anything here takes, also on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(240);
const MIB: u64 = 1 << 20;

pub(crate) struct Host {
    directory: tempfile::TempDir,
    pub(crate) base: BaseDisk,
    before: Snapshot,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// With its directories in this one, on whose disk they are then.
    pub(crate) fn below(folder: &Path) -> Self {
        let directory = tempfile::Builder::new().prefix("imp-").tempdir_in(folder).unwrap();
        let data = directory.path().join("data");
        machine::data_directory(&data).unwrap();
        drop(Store::open(data.join("images"), StoreOptions::default()).unwrap());
        let base = disk(&data, "ab", with_busybox);
        let before = Snapshot::take(&[directory.path()]).unwrap();
        Self { directory, base, before }
    }

    /// For snapshots: what a VMM writes to a file system in memory is memory of its VM, which has not so much.
    pub(crate) fn on_disk() -> Self {
        let disk = Path::new("/data");
        match crate::DRIVER {
            DriverChoice::Firecracker if disk.is_dir() => Self::below(disk),
            _ => Self::new(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path().join("data")
    }

    /// Where a VM's record, disk and logs are.
    pub(crate) fn vm(&self, id: &VmId) -> PathBuf {
        self.data().join("vms").join(id.as_str())
    }

    pub(crate) fn config(&self) -> Config {
        Config {
            data: self.data(),
            runtime: self.path().join("run"),
            guest_agent: machine::guest_agent().unwrap(),
            driver: crate::DRIVER,
            firecracker: node::artefacts::firecracker().ok(),
            qemu: None,
            bridge: BridgeSettings::default(),
        }
    }

    pub(crate) async fn open(&self) -> Runtime {
        let runtime = Runtime::open(self.config()).await.unwrap();
        node::lent::keep(&self.data()).unwrap();
        runtime
    }

    pub(crate) fn spec(&self, name: &str, command: &[&str]) -> VmSpec {
        VmSpec {
            name: name.parse().unwrap(),
            base: self.base.clone(),
            cpus: Cpus::new(1).unwrap(),
            memory: Memory::from_bytes(128 * MIB).unwrap(),
            scratch: DiskSize::from_bytes(64 * MIB).unwrap(),
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
            network: Some(NetworkMode::None),
            bridge: BridgeWishes::default(),
            ports: Vec::new(),
            mounts: Vec::new(),
            labels: BTreeMap::new(),
            limits: Limits::default(),
            balloon: Balloon::Without,
            stop_grace: Duration::from_secs(5),
            kernel: KernelChoice::Default,
            when_stopped: WhenStopped::Keep,
        }
    }

    pub(crate) fn shell(&self, name: &str, script: &str) -> VmSpec {
        self.spec(name, &["sh", "-c", script])
    }

    /// A disk with one program in it and nothing else, not even a directory.
    pub(crate) fn disk_with_only(&self, program: &str) -> BaseDisk {
        let program = program.to_owned();
        disk(&self.data(), "cd", move |root| {
            std::fs::copy(machine::program("busybox").unwrap(), root.join(program)).unwrap();
        })
    }

    /// Removes all VMs, which must have stopped, and checks that nothing of them is left anywhere.
    pub(crate) async fn end(&self, runtime: Runtime) {
        let ids: Vec<VmId> = runtime.list().iter().map(|vm| vm.id.clone()).collect();
        for id in &ids {
            runtime.remove(id).await.unwrap();
        }
        drop(runtime);
        self.assert_nothing_left(&ids);
    }

    /// Of these VMs and below the directories of this host.
    pub(crate) fn assert_nothing_left(&self, ids: &[VmId]) {
        let store = Store::open(self.data().join("images"), StoreOptions::default()).unwrap();
        let pins: Vec<String> = store.pins().unwrap().into_iter().map(|pin| pin.owner).collect();
        assert!(pins.is_empty(), "pins are left: {pins:?}");
        let (data, run) = (self.data(), self.path().join("run"));
        // What the engine keeps for the next VM.
        let kept = [
            "images",
            "initramfs",
            "owner.lock",
            "probes.json",
            "firecracker.json",
            "networks.json",
            "template-console.log",
            "vms",
        ]
        .map(|name| data.join(name));
        let expected = |thing: &Thing| match thing {
            Thing::File(path) => {
                path.starts_with(&kept[0])
                    || path.starts_with(&kept[1])
                    || kept.contains(path)
                    || *path == run
                    || *path == run.join("vms")
                    || *path == run.join("networks")
            }
            // Other tests have groups of their own.
            Thing::Cgroup(path) => !ids.iter().any(|id| path.ends_with(id.as_str())),
            Thing::Process { .. }
            | Thing::Socket(_)
            | Thing::Mount(_)
            | Thing::NetworkDevice(_)
            | Thing::Table(_) => false,
        };
        self.before.wait_until_nothing_is_left(Duration::from_secs(10), expected).unwrap();
    }
}

impl Drop for Host {
    /// What a failed test leaves running would run for ever: VMs outlive their owner.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for thing in self.before.new_since().into_iter().flatten() {
                match thing {
                    Thing::Process { pid, .. } => kill(pid, rustix::process::Signal::KILL),
                    // A network namespace lives as long as it is mounted.
                    Thing::Mount(path) => drop(imp_sys::netns::remove_at(&path)),
                    Thing::Socket(_)
                    | Thing::Cgroup(_)
                    | Thing::NetworkDevice(_)
                    | Thing::Table(_)
                    | Thing::File(_) => {}
                }
            }
        }
    }
}

fn with_busybox(root: &Path) {
    let busybox = machine::program("busybox").unwrap();
    for directory in ["bin", "etc", "tmp", "mnt", "dev", "proc", "sys"] {
        std::fs::create_dir(root.join(directory)).unwrap();
    }
    std::fs::copy(&busybox, root.join("bin/busybox")).unwrap();
    let list = Command::new(&busybox).arg("--list").output().unwrap();
    for name in String::from_utf8(list.stdout).unwrap().lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
}

/// An ext4 where the store keeps its disks.
fn disk(data: &Path, digits: &str, fill: impl FnOnce(&Path)) -> BaseDisk {
    let root = tempfile::tempdir().unwrap();
    fill(root.path());
    let digest = digits.repeat(32);
    let path = data.join("images/disks").join(format!("{digest}.ext4"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let made = Command::new(machine::program("mke2fs").unwrap())
        .stdout(Stdio::null())
        .args(["-q", "-t", "ext4", "-F", "-O", "^has_journal", "-d"])
        .arg(root.path())
        .arg(&path)
        .arg("16M")
        .status()
        .unwrap();
    assert!(made.success());
    BaseDisk { image: "busybox".into(), key: format!("sha256:{digest}"), path }
}

/// Creates and starts a VM.
pub(crate) async fn start(runtime: &Runtime, spec: VmSpec) -> VmId {
    let id = runtime.create(spec).await.unwrap();
    runtime.start(&id).await.unwrap();
    id
}

/// Waits for a status; panics with the VM's outcome when the VM stops without it.
pub(crate) async fn until(
    runtime: &Runtime,
    id: &VmId,
    mut reached: impl FnMut(&VmStatus) -> bool,
) -> Arc<VmStatus> {
    let mut watch = runtime.watch(id).unwrap();
    let mut done = false;
    let wait = watch.wait_for(|status| {
        done = reached(status);
        done || status.state == State::Stopped
    });
    let status = timeout(LONG, wait).await.expect("in time").map(|status| Arc::clone(&status)).unwrap();
    if !done {
        panic!("{} stopped: {:?}", status.name, status.outcome);
    }
    status
}

pub(crate) async fn running(runtime: &Runtime, id: &VmId) -> Arc<VmStatus> {
    until(runtime, id, |status| status.state == State::Running).await
}

pub(crate) async fn outcome(runtime: &Runtime, id: &VmId) -> Outcome {
    until(runtime, id, |status| status.state == State::Stopped).await.outcome.clone().unwrap()
}

/// Until the guest can be asked, which an adopted VM's takes a moment.
pub(crate) async fn reachable(runtime: &Runtime, id: &VmId) {
    let reached = async {
        while runtime.connection(id).await.is_err() {
            until(runtime, id, |_| true).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LONG, reached).await.unwrap();
}

pub(crate) async fn output(runtime: &Runtime, id: &VmId) -> String {
    let mut reader = runtime.logs(id, LogQuery { end: LogEnd::Now, ..LogQuery::default() }).await.unwrap();
    let mut bytes = Vec::new();
    while let Some(entry) = reader.next().await.unwrap() {
        bytes.extend(entry.data);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a script in the guest: its output, both kinds, and its exit code.
pub(crate) async fn exec(runtime: &Runtime, id: &VmId, script: &str) -> (String, u32) {
    timeout(LONG, try_exec(runtime, id, script)).await.expect("in time").unwrap()
}

/// An end of the stream before the exit status is an error.
pub(crate) async fn try_exec(runtime: &Runtime, id: &VmId, script: &str) -> anyhow::Result<(String, u32)> {
    let hold = runtime.connection(id).await?;
    let start = ProcessSpec {
        arguments: ["sh", "-c", script].map(|word| word.as_bytes().to_vec().into()).to_vec(),
        environment: vec!["PATH=/bin".into()],
        // Connected, and silent until the process has ended.
        stdin: true,
        ..ProcessSpec::default()
    };
    let (input, inputs) = tokio::sync::mpsc::channel(1);
    input.send(ExecInput { input: Some(exec_input::Input::Start(start)) }).await?;
    let inputs = tokio_stream::wrappers::ReceiverStream::new(inputs);
    let mut outputs = ProcessesClient::new(hold.connection()).exec(inputs).await?.into_inner();
    let mut text = Vec::new();
    while let Some(message) = outputs.message().await? {
        match message.output {
            Some(exec_output::Output::Stdout(data) | exec_output::Output::Stderr(data)) => text.extend(data),
            Some(exec_output::Output::Exited(status)) => {
                let code = match status.how {
                    Some(exit_status::How::Code(code)) => code,
                    Some(exit_status::How::Signal(signal)) => 128 + signal,
                    other => anyhow::bail!("{other:?}"),
                };
                return Ok((String::from_utf8_lossy(&text).into_owned(), code));
            }
            _ => {}
        }
    }
    anyhow::bail!("the stream ended without an exit status")
}

/// A main process that an orderly stop does not end, once it is [`deaf`].
pub(crate) const STUBBORN: &str = "trap '' TERM; touch /deaf; while :; do sleep 1; done";

/// Waits until a [`STUBBORN`] process ignores its stop signal.
pub(crate) async fn deaf(runtime: &Runtime, id: &VmId) {
    assert_eq!(exec(runtime, id, "until [ -e /deaf ]; do sleep 0.05; done").await.1, 0);
}

pub(crate) fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    match rustix::process::kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Waits for something outside the engine.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "{what} in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}
