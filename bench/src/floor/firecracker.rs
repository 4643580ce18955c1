//! Firecracker with a snapshot of ours.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_testkit::node::artefacts;
use serde_json::json;

use super::{Files, Kind};
use crate::firecracker::{CHANNEL, call, connect};

pub(super) struct Machine {
    vmm: Child,
    api: UnixStream,
    vsock: PathBuf,
}

pub(super) fn load(files: &Files, folder: &Path) -> anyhow::Result<Machine> {
    let vmm = Command::new(artefacts::firecracker()?)
        .args(["--id", "bare", "--api-sock", "api.sock"])
        // Drives and vsock have the names in it that they have in the snapshot.
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(File::create(folder.join("console"))?)
        .stderr(File::create(folder.join("vmm.log"))?)
        .spawn()
        .context("starting Firecracker")?;
    let vmm = Ended(Some(vmm));
    let mut api = connect(&folder.join("api.sock"))?;
    let body = json!({
        "snapshot_path": files.state,
        "mem_backend": {"backend_type": "File", "backend_path": files.memory},
        "enable_diff_snapshots": true,
        "resume_vm": false,
    });
    call(&mut api, "PUT", "/snapshot/load", &body)?;
    Ok(Machine { vmm: vmm.kept()?, api, vsock: folder.join("v.sock") })
}

impl super::Machine for Machine {
    fn pid(&self) -> u32 {
        self.vmm.id()
    }

    fn resume(&mut self) -> anyhow::Result<()> {
        call(&mut self.api, "PATCH", "/vm", &json!({"state": "Resumed"}))
    }

    fn channel(&mut self, patience: Duration) -> anyhow::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.vsock)?;
        stream.set_read_timeout(Some(patience))?;
        stream.write_all(format!("CONNECT {CHANNEL}\n").as_bytes())?;
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        ensure!(answer.starts_with(b"OK "), "Firecracker answers {}", String::from_utf8_lossy(&answer));
        Ok(stream)
    }

    fn write_down(&mut self, kind: Kind, folder: &Path) -> anyhow::Result<()> {
        call(&mut self.api, "PATCH", "/vm", &json!({"state": "Paused"}))?;
        let kind = match kind {
            Kind::Full => "Full",
            Kind::Changes => "Diff",
        };
        let body = json!({
            "snapshot_type": kind, "snapshot_path": folder.join("state"), "mem_file_path": folder.join("memory"),
        });
        call(&mut self.api, "PUT", "/snapshot/create", &body)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        end(&mut self.vmm);
    }
}

/// A process that ends unless it is kept.
pub(super) struct Ended(pub(super) Option<Child>);

impl Ended {
    pub(super) fn kept(mut self) -> anyhow::Result<Child> {
        self.0.take().context("a process is kept once")
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            end(process);
        }
    }
}

pub(super) fn end(process: &mut Child) {
    // It may have ended by itself.
    drop(process.kill());
    drop(process.wait());
}
