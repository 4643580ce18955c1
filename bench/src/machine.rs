//! An `imp` with data and runtime directories of its own, and the VMs that the budgets need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use imp_protocol::connection::{self, Connection};
use imp_protocol::lane::Lane;
use imp_testkit::imp::Driver;
use imp_testkit::{images, machine};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use crate::programs::run;

/// The image that VMs are made of: busybox, so that what is measured is ours.
pub(crate) const IMAGE: &str = images::BUSYBOX;

pub(crate) struct Machine {
    driver: Driver,
    folder: tempfile::TempDir,
    pub(crate) runtime: Runtime,
}

/// A VM in the background.
pub(crate) struct Vm {
    pub(crate) id: String,
}

impl Machine {
    /// With the image in its store, and its owner running.
    pub(crate) fn new(driver: Driver) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("imp-bench-").tempdir()?;
        machine::data_directory(&folder.path().join("data"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let machine = Self { driver, folder, runtime };
        let layout = format!("oci:{}", images::busybox()?.display());
        run(machine.imp()?.args(["image", "import", &layout]))?;
        run(machine.imp()?.arg("ps"))?;
        Ok(machine)
    }

    pub(crate) fn imp(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(machine::imp()?);
        command.env("IMP_DATA_DIR", self.data()).env("IMP_RUNTIME_DIR", self.folder.path().join("run"));
        // The bare machines beside ours are this driver's.
        command.envs(self.driver.variables()?);
        Ok(command)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A folder for what one measurement makes.
    pub(crate) fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        Ok(tempfile::tempdir_in(self.folder.path())?)
    }

    /// Starts a VM without a network that waits to be stopped.
    pub(crate) fn start(&self) -> anyhow::Result<Vm> {
        self.start_with(&["--network", "none"])
    }

    /// The same with these flags.
    pub(crate) fn start_with(&self, flags: &[&str]) -> anyhow::Result<Vm> {
        let before = self.ids()?;
        run(self.imp()?.args(["run", "-d"]).args(flags).args([IMAGE, "--", "sleep", "1000000"]))?;
        let id = self.ids()?.into_iter().find(|id| !before.contains(id)).context("the VM has no record")?;
        Ok(Vm { id })
    }

    pub(crate) fn remove(&self, vm: &Vm) -> anyhow::Result<()> {
        run(self.imp()?.args(["rm", "-f", &vm.id]))
    }

    /// A connection to the VM's agent, through the owner.
    pub(crate) fn guest(&self, vm: &Vm) -> anyhow::Result<Connection> {
        let socket = self.folder.path().join("run/owner.sock");
        let owner = self.runtime.block_on(async {
            let stream = UnixStream::connect(&socket).await;
            let stream = stream.with_context(|| format!("connecting to {}", socket.display()))?;
            anyhow::Ok(connection::connect_owner(stream).await?)
        })?;
        Ok(owner.for_vm(&vm.id)?)
    }

    /// The lane of the VM, from the owner.
    pub(crate) fn lane(&self, vm: &Vm) -> anyhow::Result<Lane> {
        Lane::ask(&self.folder.path().join("run/lanes.sock"), &vm.id)
            .context("the VM's lane is not to be had")
    }

    /// Process id of the owner.
    pub(crate) fn owner(&self) -> anyhow::Result<u32> {
        let socket = self.folder.path().join("run");
        processes()
            .find(|(_, words)| {
                words.iter().any(|word| word == "owner") && words.iter().any(|word| Path::new(word) == socket)
            })
            .map(|(pid, _)| pid)
            .context("the owner does not run")
    }

    fn ids(&self) -> anyhow::Result<Vec<String>> {
        let entries = fs::read_dir(self.data().join("vms")).into_iter().flatten();
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Measurements that failed half way leave VMs; the owner ends by itself.
        for id in self.ids().unwrap_or_default() {
            let removed = self.imp().and_then(|mut imp| run(imp.args(["rm", "-f", &id])));
            if let Err(error) = removed {
                eprintln!("bench: the VM {id} is left: {error}");
            }
        }
        if let Err(error) = self.imp().and_then(|mut imp| run(imp.args(["owner", "stop"]))) {
            eprintln!("bench: the owner is left: {error}");
        }
    }
}

/// The process of the VM's QEMU.
pub(crate) fn qemu(vm: &Vm) -> anyhow::Result<u32> {
    let name = format!("imp-{}", vm.id);
    let named = |words: &[String]| {
        words.iter().zip(words.iter().skip(1)).any(|(option, value)| option == "-name" && *value == name)
    };
    processes().find(|(_, words)| named(words)).map(|(pid, _)| pid).context("the VM has no VMM")
}

/// The words of the command line of a process.
pub(crate) fn command_line(pid: u32) -> anyhow::Result<Vec<String>> {
    let words = fs::read(format!("/proc/{pid}/cmdline"))?;
    let words = String::from_utf8(words).context("a command line that is no text")?;
    ensure!(!words.is_empty(), "the process {pid} has ended");
    Ok(words.trim_end_matches('\0').split('\0').map(str::to_owned).collect())
}

fn processes() -> impl Iterator<Item = (u32, Vec<String>)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, command_line(pid).ok()?))
    })
}
