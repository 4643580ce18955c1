//! The engine in this process, as an owner has it, with a template of a guest that does nothing.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::Context as _;
use imp_runtime::spec::{
    Arguments, BaseDisk, BridgeSettings, Bytes, Child, Cpus, DiskSize, Environment, Identity, KernelChoice,
    Limits, MainProcess, Memory, NetworkMode, Stdin, VmSpec, WhenStopped,
};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::template::TemplateSpec;
use imp_runtime::{Config, Digest, DriverChoice, ForkRequest, Forked, GuestHold, Runtime, VmId, WithSecrets};
use imp_storage::snapshots::Part;
use imp_storage::store::{Store, StoreOptions};
use imp_testkit::imp::Driver;
use imp_testkit::{images, machine, node};

use crate::floor::{Files, NOTHING};
use crate::guest;
use crate::machine::IMAGE;
use crate::programs::run;

const MIB: u64 = 1 << 20;
/// Of a node: what a VMM writes to a file system in memory is memory of its VM.
const DISK: &str = "/data";

pub(crate) struct Engine {
    folder: tempfile::TempDir,
    driver: Driver,
    tokio: tokio::runtime::Runtime,
    runtime: Runtime,
    base: BaseDisk,
    made: Cell<u32>,
}

impl Engine {
    pub(crate) fn new(driver: Driver) -> anyhow::Result<Self> {
        let mut folder = tempfile::Builder::new();
        let folder = folder.prefix("imp-bench-");
        let folder = match driver {
            Driver::Firecracker if Path::new(DISK).is_dir() => folder.tempdir_in(DISK)?,
            Driver::Firecracker | Driver::Qemu => folder.tempdir()?,
        };
        let data = folder.path().join("data");
        machine::data_directory(&data)?;
        let layout = format!("oci:{}", images::busybox()?.display());
        let variables = [("IMP_DATA_DIR", data.clone()), ("IMP_RUNTIME_DIR", folder.path().join("run"))];
        run(Command::new(machine::imp()?).args(["image", "import", &layout]).envs(variables))?;
        let base = base(&data)?;
        // As an owner's: one thread for all VMs.
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = Config {
            runtime: folder.path().join("run"),
            data,
            guest_agent: machine::guest_agent()?,
            driver: match driver {
                Driver::Qemu => DriverChoice::Qemu,
                Driver::Firecracker => DriverChoice::Firecracker,
            },
            firecracker: node::artefacts::firecracker().ok(),
            qemu: None,
            bridge: BridgeSettings::default(),
        };
        let runtime = tokio.block_on(Runtime::open(config))?;
        Ok(Self { folder, driver, tokio, runtime, base, made: Cell::new(0) })
    }

    pub(crate) fn driver(&self) -> Driver {
        self.driver
    }

    /// On the thread of all VMs.
    pub(crate) fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.tokio.block_on(work)
    }

    /// A folder for what one measurement makes, on the disk where VMs are.
    pub(crate) fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        Ok(tempfile::tempdir_in(self.folder.path())?)
    }

    pub(crate) fn template(&self, memory_mib: u64) -> anyhow::Result<Digest> {
        let VmSpec { base, cpus, memory, scratch, network, kernel, hostname, main, limits, .. } =
            self.spec(memory_mib)?;
        let (init, ready) = (Vec::new(), Vec::new());
        let spec = TemplateSpec {
            base,
            cpus,
            memory,
            scratch,
            network,
            kernel,
            hostname,
            main,
            limits,
            init,
            ready,
        };
        Ok(self.wait(self.runtime.template_build(spec, |_| {}))?)
    }

    /// What machines of this snapshot are made of, for a client of the VMM alone.
    pub(crate) fn files(&self, snapshot: &Digest) -> anyhow::Result<Files> {
        let store = Store::open(self.folder.path().join("data/images"), StoreOptions::default())?;
        let part = |part| store.snapshots().place(snapshot, part);
        Ok(Files {
            base: self.base.path.clone(),
            memory: part(Part::Memory),
            state: part(Part::State),
            scratch: part(Part::Scratch),
        })
    }

    /// A VM that boots, once it runs.
    pub(crate) fn boot(&self, memory_mib: u64) -> anyhow::Result<VmId> {
        let spec = self.spec(memory_mib)?;
        self.wait(async {
            let id = self.runtime.create(spec).await?;
            self.runtime.start(&id).await?;
            let mut status = self.runtime.watch(&id)?;
            let up = status.wait_for(|vm| matches!(vm.state, State::Running | State::Stopped)).await?;
            anyhow::ensure!(up.state == State::Running, "the VM stopped: {:?}", up.outcome);
            Ok(id.clone())
        })
    }

    pub(crate) async fn prepare(&self, snapshot: &Digest) -> anyhow::Result<VmId> {
        Ok(self.runtime.prepare(snapshot, self.child()?).await?)
    }

    pub(crate) async fn activate(&self, id: &VmId) -> anyhow::Result<()> {
        self.runtime.activate(id, Identity::default()).await?;
        Ok(())
    }

    pub(crate) async fn restore(&self, snapshot: &Digest) -> anyhow::Result<VmId> {
        Ok(self.runtime.restore(snapshot, self.child()?, Identity::default()).await?.id.clone())
    }

    pub(crate) async fn fork(&self, parent: &VmId, children: usize) -> anyhow::Result<Forked> {
        let child = || anyhow::Ok((self.child()?, Identity::default()));
        let children = (0..children).map(|_| child()).collect::<Result<_, _>>()?;
        Ok(self.runtime.fork(parent, ForkRequest { children, secrets: WithSecrets::Refused }).await?)
    }

    pub(crate) async fn guest(&self, id: &VmId) -> anyhow::Result<GuestHold> {
        Ok(self.runtime.connection(id).await?)
    }

    /// The smallest program, to its end.
    pub(crate) async fn exec(&self, id: &VmId) -> anyhow::Result<()> {
        let guest = self.guest(id).await?;
        guest::exec(&guest.connection(), NOTHING).await.map(drop)
    }

    pub(crate) fn status(&self, id: &VmId) -> anyhow::Result<Arc<VmStatus>> {
        Ok(self.runtime.get(id)?)
    }

    /// The VMM's process.
    pub(crate) fn vmm(&self, id: &VmId) -> anyhow::Result<u32> {
        self.status(id)?.vmm_pid.context("the VM has no VMM")
    }

    /// Ends a VM, which removes itself.
    pub(crate) async fn end(&self, id: &VmId) -> anyhow::Result<()> {
        self.runtime.kill(id).await?;
        Ok(())
    }

    fn child(&self) -> anyhow::Result<Child> {
        Ok(Child { when_stopped: WhenStopped::Remove, ..Child::named(self.name().parse()?) })
    }

    fn name(&self) -> String {
        self.made.set(self.made.get() + 1);
        format!("vm-{}", self.made.get())
    }

    fn spec(&self, memory_mib: u64) -> anyhow::Result<VmSpec> {
        Ok(VmSpec {
            name: self.name().parse()?,
            base: self.base.clone(),
            cpus: Cpus::new(1)?,
            memory: Memory::from_bytes(memory_mib * MIB)?,
            scratch: DiskSize::from_bytes(64 * MIB)?,
            main: MainProcess {
                arguments: Arguments::new(["sleep", "1000000"])?,
                environment: Environment::new(["PATH=/bin:/usr/bin"])?,
                user: String::new(),
                working_directory: Bytes::default(),
                terminal: None,
                stdin: Stdin::Null,
                stop_signal: String::new(),
                open_files: None,
            },
            hostname: "guest".parse()?,
            network: Some(NetworkMode::None),
            bridge: Default::default(),
            ports: Vec::new(),
            mounts: Vec::new(),
            labels: Default::default(),
            limits: Limits::default(),
            balloon: Default::default(),
            stop_grace: Default::default(),
            kernel: KernelChoice::Default,
            when_stopped: WhenStopped::Remove,
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Measurements that failed half way leave VMs.
        for vm in self.runtime.list() {
            if let Err(error) = self.wait(self.runtime.kill(&vm.id)) {
                eprintln!("bench: the VM {} is left: {error}", vm.id);
            }
        }
    }
}

/// The only disk in the store.
fn base(data: &Path) -> anyhow::Result<BaseDisk> {
    let disks = fs::read_dir(data.join("images/disks"))?;
    let paths: Vec<PathBuf> = disks.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    let path = paths.into_iter().find(|path| path.extension().is_some_and(|end| end == "ext4"));
    let path = path.context("the image has no disk")?;
    let digest = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(BaseDisk { image: IMAGE.to_owned(), key: format!("sha256:{digest}"), path })
}
