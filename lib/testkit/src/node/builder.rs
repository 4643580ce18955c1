//! What a node is to be like, and its start.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use imp_testkit_node::guard::{self, Plan};
use imp_testkit_node::wire::Message;

use super::error::Error;
use super::launch::{DISK, Folder, INITRAMFS};
use super::network::Network;
use super::plan::{self, Attachment, Machine};
use super::{NodeVm, artefacts};
use crate::machine;

/// A quiet machine needs five seconds, a busy one with many nodes at once ten times as much; more is a fault.
const READY_DEADLINE: Duration = Duration::from_secs(120);

/// Names at the root that are links into `/usr` where the system has merged them.
const ROOT_NAMES: [&str; 5] = ["/bin", "/sbin", "/lib", "/lib64", "/lib32"];
/// What programs of the host need besides, to run elsewhere: no secrets are in these.
const SYSTEM: [&str; 3] = ["/usr", "/etc/alternatives", "/etc/ld.so.cache"];

/// Settings of a node: 2 GiB of memory, a disk of 16 GiB that takes room only as it fills, no network.
#[derive(Debug)]
pub struct Builder<'a> {
    name: String,
    memory_mib: u32,
    disk_gib: u32,
    shares: Vec<PathBuf>,
    network: Option<&'a Network>,
}

impl Builder<'static> {
    pub(super) fn new() -> Self {
        Self { name: "node".to_owned(), memory_mib: 2048, disk_gib: 16, shares: Vec::new(), network: None }
    }
}

impl Builder<'_> {
    /// Host name of the node, and part of the names of its logs.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Size of the ext4 file system at `/data`.
    #[must_use]
    pub fn disk_gib(mut self, disk_gib: u32) -> Self {
        self.disk_gib = disk_gib;
        self
    }

    /// One more directory or file of the host that the node sees, under the same path. What it writes there stays in
    /// the node.
    #[must_use]
    pub fn share(mut self, path: impl Into<PathBuf>) -> Self {
        self.shares.push(path.into());
        self
    }

    /// The node gets `eth0` with an address in this network.
    #[must_use]
    pub fn network(self, network: &Network) -> Builder<'_> {
        let Self { name, memory_mib, disk_gib, shares, network: _ } = self;
        Builder { name, memory_mib, disk_gib, shares, network: Some(network) }
    }

    /// Boots the node and waits until it answers.
    pub fn start(self) -> Result<NodeVm, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Root);
        }
        let attachment = self.network.map(Network::attach).transpose()?;
        let folder = Folder::make(self.disk_gib)?;
        let plan = self.plan(folder.path(), attachment.as_ref())?;
        let (channel, guard) = match self.network {
            Some(network) => network.within(|| folder.start_guard(&plan))??,
            None => folder.start_guard_without_network(&plan)?,
        };
        let (node, ready) = NodeVm::new(channel, guard, self.name, folder.keep(), attachment)?;
        match ready.messages.recv_timeout(READY_DEADLINE) {
            Ok(Message::Ready) => Ok(node),
            Ok(_) | Err(RecvTimeoutError::Disconnected) => Err(Error::Ended { logs: node.save_logs() }),
            Err(RecvTimeoutError::Timeout) => {
                Err(Error::NotReady { deadline: READY_DEADLINE, logs: node.save_logs() })
            }
        }
    }

    fn plan(&self, folder: &Path, attachment: Option<&Attachment>) -> Result<Plan, Error> {
        let mut wanted = self.shares.clone();
        wanted.extend(SYSTEM.iter().map(PathBuf::from).filter(|path| path.exists()));
        wanted.extend(build_outputs());
        let mut links = BTreeMap::new();
        for name in ROOT_NAMES.map(Path::new) {
            if let Ok(target) = fs::read_link(name) {
                links.insert(name.to_owned(), target);
            } else if name.is_dir() {
                wanted.push(name.to_owned());
            }
        }
        let home = env::var_os("HOME").map(PathBuf::from);
        let fine = |path: &Path| plan::may_be_shared(path, home.as_deref());
        for path in &wanted {
            // Neither by its name nor, where that is a link, by what it is.
            let real = || fs::canonicalize(path).map_err(|source| Error::Read { path: path.clone(), source });
            if !fine(path) || !fine(&real()?) {
                return Err(Error::Share { path: path.clone() });
            }
        }
        let machine = Machine {
            qemu: &machine::program("qemu-system-x86_64")?,
            kernel: &artefacts::kernel()?,
            initramfs: &folder.join(INITRAMFS),
            disk: &folder.join(DISK),
            share_socket: &folder.join(guard::SHARE_SOCKET),
            console: &folder.join(guard::CONSOLE),
            memory_mib: self.memory_mib,
            hostname: &self.name,
            attachment,
            tsc_khz: clock_rate(),
        };
        Ok(Plan {
            shares: plan::outermost(&wanted),
            links: links.into_iter().collect(),
            virtiofsd: artefacts::virtiofsd()?,
            qemu: machine.arguments(),
        })
    }
}

/// Once in each process: it takes 50 ms.
fn clock_rate() -> Option<u64> {
    static KHZ: OnceLock<Option<u64>> = OnceLock::new();
    *KHZ.get_or_init(|| imp_sys::tsc::measure_khz(Duration::from_millis(50)))
}

/// What was built and fetched for tests, as far as it is there.
fn build_outputs() -> Vec<PathBuf> {
    let mut outputs = Vec::new();
    if let Ok(program) = env::current_exe() {
        // Cargo keeps test programs in `deps`, beside which the other programs are.
        let profile = program.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
        outputs.extend(profile.map(Path::to_owned));
    }
    for variable in [artefacts::PROGRAMS, "IMP_TEST_KERNELS"] {
        outputs.extend(env::var_os(variable).map(PathBuf::from));
    }
    outputs.extend(artefacts::folder());
    outputs.extend(machine::cache().map(|cache| cache.join("fixtures")));
    outputs.retain(|path| path.exists());
    outputs
}
