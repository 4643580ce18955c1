//! The floor of what a VM in Firecracker could do: the same kernel, initramfs, disks and command line, asked of its API by
//! nobody but us.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use imp_protocol::connection::{self, Connection};
use imp_testkit::node::artefacts;
use serde_json::{Value, json};

use crate::guest;
use crate::machine::{Machine, Vm};
use crate::programs::run;

pub(crate) const MEMORY_MIB: u32 = 128;
/// The port of the guest's agent, and of the host at which it knocks.
pub(crate) const CHANNEL: u32 = 10_000;
const PATIENCE: Duration = Duration::from_secs(180);
/// What Firecracker itself adds to a command line.
const ADDED: [&str; 3] = ["virtio_mmio.device=", "root=", "rw"];

/// What a VM of ours boots from, and a scratch disk as that one had it when it was taken.
pub(crate) struct Template {
    kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    base: PathBuf,
    scratch: PathBuf,
    command_line: String,
}

/// A Firecracker that ends when it is dropped.
pub(crate) struct Bare {
    vmm: Child,
    vsock: PathBuf,
    knock: UnixListener,
}

impl Template {
    /// `folder` keeps the copy of the disk.
    pub(crate) fn take(machine: &Machine, vm: &Vm, folder: &Path) -> anyhow::Result<Self> {
        let agent = machine.guest(vm)?;
        let line = machine.runtime.block_on(guest::exec(&agent, &["cat", "/proc/cmdline"]))?;
        let words = String::from_utf8(line)?;
        let words =
            words.split_whitespace().filter(|word| !ADDED.iter().any(|added| word.starts_with(added)));
        let scratch = folder.join("scratch");
        copy_sparse(&machine.data().join("vms").join(&vm.id).join("scratch.img"), &scratch)?;
        Ok(Self {
            kernel: machine.data().join("kernels/default/vmlinux"),
            initramfs: the_only_file(&machine.data().join("initramfs"))?,
            base: the_only_file(&machine.data().join("images/disks"))?,
            scratch,
            command_line: words.collect::<Vec<_>>().join(" "),
        })
    }

    /// Starts the machine. `initramfs`: another one than the template's. `tap`: of the calling thread's network namespace.
    pub(crate) fn boot(
        &self,
        folder: &Path,
        initramfs: Option<&Path>,
        tap: Option<&str>,
    ) -> anyhow::Result<Bare> {
        let scratch = folder.join("scratch");
        copy_sparse(&self.scratch, &scratch)?;
        let knock = UnixListener::bind(folder.join(format!("v.sock_{CHANNEL}")))?;
        let vmm = Command::new(artefacts::firecracker()?)
            .args(["--id", "bare", "--api-sock", "api.sock"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(File::create(folder.join("console"))?)
            .stderr(File::create(folder.join("vmm.log"))?)
            .spawn()
            .context("starting Firecracker")?;
        let bare = Bare { vmm, vsock: folder.join("v.sock"), knock };
        let mut api = connect(&folder.join("api.sock"))?;
        put(
            &mut api,
            "/machine-config",
            &json!({"vcpu_count": 1, "mem_size_mib": MEMORY_MIB, "smt": false}),
        )?;
        let initramfs = initramfs.unwrap_or(&self.initramfs);
        let source = json!({
            "kernel_image_path": self.kernel, "initrd_path": initramfs, "boot_args": self.command_line,
        });
        put(&mut api, "/boot-source", &source)?;
        put(&mut api, "/drives/base", &drive("base", &self.base, true))?;
        put(&mut api, "/drives/scratch", &drive("scratch", &scratch, false))?;
        if let Some(tap) = tap {
            put(&mut api, "/network-interfaces/net0", &json!({"iface_id": "net0", "host_dev_name": tap}))?;
        }
        put(&mut api, "/vsock", &json!({"guest_cid": 3, "uds_path": "v.sock"}))?;
        put(&mut api, "/entropy", &json!({}))?;
        put(&mut api, "/actions", &json!({"action_type": "InstanceStart"}))?;
        Ok(bare)
    }
}

impl Bare {
    /// The channel, as soon as the guest has knocked.
    pub(crate) fn channel(&self) -> anyhow::Result<UnixStream> {
        self.knock.accept().context("waiting for the guest")?;
        let mut stream = UnixStream::connect(&self.vsock)?;
        stream.write_all(format!("CONNECT {CHANNEL}\n").as_bytes())?;
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).context("the bare guest does not take a connection")?;
            answer.extend(byte);
        }
        ensure!(answer.starts_with(b"OK "), "Firecracker answers {}", String::from_utf8_lossy(&answer));
        Ok(stream)
    }

    /// The agent, as soon as it greets back.
    pub(crate) async fn agent(&self) -> anyhow::Result<Connection> {
        let channel = self.channel()?;
        channel.set_nonblocking(true)?;
        let channel = tokio::net::UnixStream::from_std(channel)?;
        let greeted = tokio::time::timeout(PATIENCE, connection::connect(channel, 1)).await;
        Ok(greeted.context("the bare guest does not greet back")??.0)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.vmm.kill());
        drop(self.vmm.wait());
    }
}

fn drive(id: &str, path: &Path, is_read_only: bool) -> Value {
    json!({
        "drive_id": id, "path_on_host": path, "is_root_device": false, "is_read_only": is_read_only,
        "cache_type": "Unsafe",
    })
}

/// A socket that is about to be there.
pub(crate) fn connect(path: &Path) -> anyhow::Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(error).with_context(|| format!("connecting to {}", path.display())),
        }
    }
}

fn put(api: &mut UnixStream, path: &str, body: &Value) -> anyhow::Result<()> {
    call(api, "PUT", path, body)
}

/// One call of the API, which answers success with 204.
pub(crate) fn call(api: &mut UnixStream, method: &str, path: &str, body: &Value) -> anyhow::Result<()> {
    let body = body.to_string();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    api.write_all(request.as_bytes())?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = api.read(&mut buffer)?;
        ensure!(read > 0, "Firecracker ended at {path}");
        answer.extend_from_slice(buffer.get(..read).unwrap_or_default());
    }
    ensure!(answer.starts_with(b"HTTP/1.1 204"), "{path}: {}", String::from_utf8_lossy(&answer));
    Ok(())
}

fn the_only_file(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|path| path.metadata().is_ok_and(|file| file.is_file() && file.len() > 0));
    match files.as_slice() {
        [only] => Ok(only.clone()),
        several => bail!("{} has {} files, not one", folder.display(), several.len()),
    }
}

fn copy_sparse(from: &Path, to: &Path) -> anyhow::Result<()> {
    run(Command::new("cp").arg("--sparse=always").args([from, to]))
}
