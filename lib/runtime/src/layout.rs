//! Every path on the host.

use std::path::{Path, PathBuf};

use crate::id::VmId;

/// Paths below the data directory (kept over a reboot) and the runtime directory (sockets).
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    data: PathBuf,
    runtime: PathBuf,
}

/// The store of images and their disks, below a data directory.
#[must_use]
pub fn images(data: &Path) -> PathBuf {
    data.join("images")
}

/// What is on record of VMs, below a data directory; there is none before the first one.
#[must_use]
pub fn vms(data: &Path) -> PathBuf {
    data.join("vms")
}

impl Layout {
    pub(crate) fn new(data: PathBuf, runtime: PathBuf) -> Self {
        Self { data, runtime }
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    /// Held by the one owner of this data directory.
    pub(crate) fn lock(&self) -> PathBuf {
        self.data.join("owner.lock")
    }

    pub(crate) fn kernels(&self) -> PathBuf {
        self.data.join("kernels")
    }

    /// Initramfs files, named by the digest of what they are made of.
    pub(crate) fn initramfs(&self) -> PathBuf {
        self.data.join("initramfs")
    }

    /// What was found out about QEMU and the host's accelerators.
    pub(crate) fn probes(&self) -> PathBuf {
        self.data.join("probes.json")
    }

    /// What was found out about Firecracker.
    pub(crate) fn firecracker_probe(&self) -> PathBuf {
        self.data.join("firecracker.json")
    }

    /// The store of images and their disks.
    pub(crate) fn images(&self) -> PathBuf {
        images(&self.data)
    }

    /// The name of this data directory in a store that others use, too.
    pub(crate) fn keeper(&self) -> PathBuf {
        self.data.join("keeper")
    }

    /// Name, pool and addresses of the bridge networks.
    pub(crate) fn networks(&self) -> PathBuf {
        self.data.join("networks.json")
    }

    /// Where the network namespaces of VMs are mounted.
    pub(crate) fn namespaces(&self) -> PathBuf {
        self.runtime.join("networks")
    }

    /// What the machine of the last template that was not made said.
    pub(crate) fn template_console(&self) -> PathBuf {
        self.data.join("template-console.log")
    }

    pub(crate) fn vms(&self) -> PathBuf {
        vms(&self.data)
    }

    pub(crate) fn runtime_vms(&self) -> PathBuf {
        self.runtime.join("vms")
    }

    pub(crate) fn vm(&self, id: &VmId) -> VmLayout {
        VmLayout { data: self.vms().join(id.as_str()), runtime: self.runtime_vms().join(id.as_str()) }
    }
}

/// Paths of one VM.
#[derive(Debug, Clone)]
pub(crate) struct VmLayout {
    data: PathBuf,
    runtime: PathBuf,
}

impl VmLayout {
    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    pub(crate) fn runtime(&self) -> &Path {
        &self.runtime
    }

    pub(crate) fn record(&self) -> PathBuf {
        self.data.join("record.json")
    }

    pub(crate) fn scratch(&self) -> PathBuf {
        self.data.join("scratch.img")
    }

    /// Directory of the main process's output.
    pub(crate) fn logs(&self) -> PathBuf {
        self.data.join("logs")
    }

    pub(crate) fn console(&self) -> PathBuf {
        self.data.join("console.log")
    }

    /// The part of the console before `console`.
    pub(crate) fn earlier_console(&self) -> PathBuf {
        self.data.join("console.1.log")
    }

    /// What the VMM itself says.
    pub(crate) fn vmm_log(&self) -> PathBuf {
        self.data.join("vmm.log")
    }

    /// The part of the VMM's log before `vmm_log`.
    pub(crate) fn earlier_vmm_log(&self) -> PathBuf {
        self.data.join("vmm.1.log")
    }

    /// What the VMM counts: a line of JSON for each minute.
    pub(crate) fn vmm_metrics(&self) -> PathBuf {
        self.data.join("metrics.log")
    }

    pub(crate) fn earlier_vmm_metrics(&self) -> PathBuf {
        self.data.join("metrics.1.log")
    }

    /// What the network helper says on stderr.
    pub(crate) fn network_log(&self) -> PathBuf {
        self.data.join("network.log")
    }

    /// Below which the jailer makes the root directory of the VMM.
    pub(crate) fn jail(&self) -> PathBuf {
        self.data.join("jail")
    }

    pub(crate) fn monitor_socket(&self) -> PathBuf {
        self.runtime.join("monitor.sock")
    }

    pub(crate) fn channel_socket(&self) -> PathBuf {
        self.runtime.join("channel.sock")
    }

    pub(crate) fn lane_socket(&self) -> PathBuf {
        self.runtime.join("lane.sock")
    }

    /// Over which QEMU writes and reads a machine's state.
    pub(crate) fn migration_socket(&self) -> PathBuf {
        self.runtime.join("migration.sock")
    }

    pub(crate) fn console_socket(&self) -> PathBuf {
        self.runtime.join("console.sock")
    }
}
