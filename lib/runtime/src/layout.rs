//! Every path on the host.

use std::path::{Path, PathBuf};

use crate::id::VmId;

/// Paths below the data directory (kept over a reboot) and the runtime directory (sockets).
#[derive(Debug, Clone)]
pub struct Layout {
    data: PathBuf,
    runtime: PathBuf,
}

impl Layout {
    pub fn new(data: PathBuf, runtime: PathBuf) -> Self {
        Self { data, runtime }
    }

    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Held by the one owner of this data directory.
    pub fn lock(&self) -> PathBuf {
        self.data.join("owner.lock")
    }

    pub fn kernels(&self) -> PathBuf {
        self.data.join("kernels")
    }

    /// Initramfs files, named by the digest of what they are made of.
    pub fn initramfs(&self) -> PathBuf {
        self.data.join("initramfs")
    }

    /// What was found out about the host's accelerators.
    pub fn probes(&self) -> PathBuf {
        self.data.join("probes.json")
    }

    /// The store of images and their disks.
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    pub fn vms(&self) -> PathBuf {
        self.data.join("vms")
    }

    pub fn runtime_vms(&self) -> PathBuf {
        self.runtime.join("vms")
    }

    pub fn vm(&self, id: &VmId) -> VmLayout {
        VmLayout { data: self.vms().join(id.as_str()), runtime: self.runtime_vms().join(id.as_str()) }
    }
}

/// Paths of one VM.
#[derive(Debug, Clone)]
pub struct VmLayout {
    data: PathBuf,
    runtime: PathBuf,
}

impl VmLayout {
    pub fn data(&self) -> &Path {
        &self.data
    }

    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    pub fn record(&self) -> PathBuf {
        self.data.join("record.json")
    }

    pub fn scratch(&self) -> PathBuf {
        self.data.join("scratch.img")
    }

    /// Directory of the main process's output.
    pub fn logs(&self) -> PathBuf {
        self.data.join("logs")
    }

    pub fn console(&self) -> PathBuf {
        self.data.join("console.log")
    }

    /// The part of the console before `console`.
    pub fn earlier_console(&self) -> PathBuf {
        self.data.join("console.1.log")
    }

    /// What the VMM itself says on stderr.
    pub fn vmm_log(&self) -> PathBuf {
        self.data.join("vmm.log")
    }

    /// What the network helper says on stderr.
    pub fn network_log(&self) -> PathBuf {
        self.data.join("network.log")
    }

    pub fn monitor_socket(&self) -> PathBuf {
        self.runtime.join("monitor.sock")
    }

    pub fn channel_socket(&self) -> PathBuf {
        self.runtime.join("channel.sock")
    }

    pub fn console_socket(&self) -> PathBuf {
        self.runtime.join("console.sock")
    }

    /// Written by the network helper; its path is also how the helper is recognised.
    pub fn network_pid(&self) -> PathBuf {
        self.runtime.join("network.pid")
    }
}
