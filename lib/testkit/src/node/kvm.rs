//! Whether KVM runs guests here. The device may be there, and open, and still not run a kernel: so one is started.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::artefacts;

/// A guest with KVM writes its first line in a tenth of a second.
const DEADLINE: Duration = Duration::from_secs(2);

/// Boots a kernel in Firecracker until it says its name. What cannot be tried does not work.
pub(super) fn works() -> bool {
    fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
        && a_kernel_speaks().unwrap_or(false)
}

fn a_kernel_speaks() -> Option<bool> {
    let (firecracker, kernel) = (artefacts::firecracker().ok()?, artefacts::kernel().ok()?);
    let folder = tempfile::tempdir().ok()?;
    let settings = folder.path().join("settings.json");
    fs::write(&settings, machine(&kernel)).ok()?;
    let mut firecracker = Command::new(firecracker)
        .args(["--no-api", "--config-file"])
        .arg(&settings)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let output = firecracker.stdout.take()?;
    let (said, heard) = channel();
    thread::spawn(move || {
        let spoke =
            BufReader::new(output).lines().map_while(Result::ok).any(|line| line.contains("Linux version"));
        // Nobody listens any more after the deadline.
        let _ = said.send(spoke);
    });
    let spoke = heard.recv_timeout(DEADLINE).unwrap_or(false);
    // One that has ended already cannot be killed, which is as good.
    let _ = firecracker.kill();
    let _ = firecracker.wait();
    Some(spoke)
}

fn machine(kernel: &Path) -> String {
    serde_json::json!({
        "boot-source": { "kernel_image_path": kernel, "boot_args": "console=ttyS0 reboot=k panic=-1 pci=off" },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 256 },
    })
    .to_string()
}
