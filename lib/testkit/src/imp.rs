//! `imp` as a user has it, with directories of its own: nothing of it may be left when a test ends.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::leftovers::{Snapshot, Thing};
use crate::{images, machine, node};

/// How long a command may take on a busy machine that emulates its guests.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long what was ended may take to be gone.
const GONE: Duration = Duration::from_secs(30);
/// Between two looks at a condition.
const LOOK: Duration = Duration::from_millis(20);

/// What runs the guests of an Imp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    Qemu,
    Firecracker,
}

impl Driver {
    /// As the user says it, and as a VM's status does.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
        }
    }

    /// The variables by which `imp` is told.
    pub fn variables(self) -> anyhow::Result<Vec<(&'static str, PathBuf)>> {
        let mut variables = vec![("IMP_DRIVER", self.name().into())];
        if self == Self::Firecracker {
            variables.push(("IMP_FIRECRACKER", node::artefacts::firecracker()?));
        }
        Ok(variables)
    }
}

/// A user's own Imp.
pub struct Imp {
    folder: PathBuf,
    variables: Vec<(&'static str, PathBuf)>,
    program: PathBuf,
    agent: PathBuf,
    before: Snapshot,
    ended: bool,
    /// Removed with this Imp.
    temporary: Option<tempfile::TempDir>,
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Came {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Came {
    /// Stdout of a command that succeeded.
    pub fn good(self) -> anyhow::Result<String> {
        ensure!(self.code == Some(0), "exit status {:?}\n{}{}", self.code, self.stdout, self.stderr);
        Ok(self.stdout)
    }
}

impl Imp {
    pub fn new(driver: Driver) -> anyhow::Result<Self> {
        let place = if node::is_node() { PathBuf::from(node::NODE_DISK) } else { std::env::temp_dir() };
        let folder = tempfile::Builder::new().prefix("imp-").tempdir_in(place)?;
        let mut imp = Self::in_folder(driver, folder.path().to_owned())?;
        imp.temporary = Some(folder);
        Ok(imp)
    }

    fn in_folder(driver: Driver, folder: PathBuf) -> anyhow::Result<Self> {
        machine::data_directory(&folder.join("data"))?;
        let before = Snapshot::take(&[&folder])?;
        Ok(Self {
            variables: driver.variables()?,
            program: machine::imp()?,
            agent: machine::guest_agent()?,
            folder,
            before,
            ended: false,
            temporary: None,
        })
    }

    /// With the busybox image in the store, as `imp.test/busybox`.
    pub fn with_busybox(driver: Driver) -> anyhow::Result<Self> {
        let imp = Self::new(driver)?;
        imp.import_busybox()?;
        Ok(imp)
    }

    fn import_busybox(&self) -> anyhow::Result<()> {
        let source = format!("oci:{}", images::busybox()?.display());
        self.run(["image", "import", &source])?.good().map(drop)
    }

    /// A folder for the test's own files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("run/owner.sock")
    }

    /// A command that is yet to be run: no terminal, no input, none of the user's own settings.
    pub fn command(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        self.command_of(&self.program, arguments)
    }

    /// As `command`, of another program that is told where things are as `imp` is.
    pub(crate) fn command_of(
        &self,
        program: &Path,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(&self.folder)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env_remove("IMP_OWNER_IDLE_SECONDS")
            .env_remove("IMP_INSECURE_REGISTRIES")
            .env_remove("IMP_LOG")
            .env_remove("NO_COLOR")
            .env("DOCKER_CONFIG", self.docker())
            .env("IMP_DATA_DIR", self.data())
            .env("IMP_RUNTIME_DIR", self.folder.join("run"))
            .env("IMP_SETTINGS", self.settings())
            .env("IMP_GUEST_AGENT", &self.agent)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The settings file, empty unless a test writes one.
    pub fn settings(&self) -> PathBuf {
        let path = self.folder.join("settings.toml");
        if !path.exists() {
            // A failure shows in the command, which cannot read it.
            let _ = std::fs::write(&path, "");
        }
        path
    }

    /// Docker's configuration directory; a test that wants one makes it.
    pub fn docker(&self) -> PathBuf {
        self.folder.join("docker")
    }

    /// Runs a command to its end.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> anyhow::Result<Came> {
        finish(self.command(arguments).spawn()?)
    }

    /// Runs a command to its end with something to read.
    pub fn run_with_input(
        &self,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        input: &[u8],
    ) -> anyhow::Result<Came> {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        let input = input.to_owned();
        // A command that does not read all of it is none of this thread's business.
        let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let came = finish(child);
        let _ = writer.join();
        came
    }

    /// What `inspect` says of one VM.
    pub fn inspect(&self, vm: &str) -> anyhow::Result<serde_json::Value> {
        let text = self.run(["inspect", vm])?.good()?;
        let mut vms: Vec<serde_json::Value> = serde_json::from_str(&text)?;
        vms.pop().context("inspect shows no VM")
    }

    /// Where a VM is in its life.
    pub fn state(&self, vm: &str) -> anyhow::Result<String> {
        let vm = self.inspect(vm)?;
        let state = vm.pointer("/state").and_then(serde_json::Value::as_str);
        state.map(str::to_owned).context("the VM has no state")
    }

    /// Process id of the owner that lives.
    pub fn owner_pid(&self) -> anyhow::Result<Option<u32>> {
        let version: serde_json::Value = serde_json::from_str(&self.run(["version", "-o", "json"])?.good()?)?;
        Ok(version
            .pointer("/owner/pid")
            .and_then(serde_json::Value::as_u64)
            .and_then(|pid| pid.try_into().ok()))
    }

    /// Ends the owner as the kernel would.
    pub fn kill_owner(&self) -> anyhow::Result<()> {
        let killed = self.owner_pid()?.context("no owner lives")?;
        let pid = i32::try_from(killed).ok().and_then(rustix::process::Pid::from_raw).context("no pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        // A client that was connected starts the next one at once.
        wait_until("the owner is gone", || Ok(self.owner_pid()? != Some(killed)))
    }

    /// Removes all VMs, ends the owner, and checks that nothing is left.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.ended = true;
        self.clear()?;
        let vms = self.data().join("vms");
        // Images, the log and the test's own files stay; of VMs nothing does. Control groups and network devices are
        // the whole machine's: those of tests beside this one are there too.
        self.before.wait_until_nothing_is_left(GONE, |thing| match thing {
            Thing::File(path) => !path.starts_with(&vms) || *path == vms,
            Thing::Cgroup(_) | Thing::NetworkDevice(_) | Thing::Table(_) => true,
            Thing::Process { .. } | Thing::Socket(_) | Thing::Mount(_) => false,
        })
    }

    fn start_shared(&self) -> anyhow::Result<()> {
        let line = ["run", "-d", "--name", "vm", "--network", "none", images::BUSYBOX, "sleep", "100000"];
        self.run(line)?.good().map(drop)
    }

    fn clear(&self) -> anyhow::Result<()> {
        let names = self.run(["ps", "-aq"])?.good()? + &self.run(["ps", "-q", "--prepared"])?.good()?;
        let names: Vec<&str> = names.lines().collect();
        if !names.is_empty() {
            self.run(["rm", "-f"].iter().chain(&names))?.good()?;
        }
        self.run(["owner", "stop"])?.good()?;
        node::lent::keep(&self.data())?;
        wait_until("the owner is gone", || Ok(!self.socket().exists()))
    }
}

/// An Imp with one VM that tests of a program share: busybox without a network, called `vm`. A boot is what takes time.
pub struct SharedVm(Arc<Imp>);

static SHARED: Mutex<Weak<Imp>> = Mutex::new(Weak::new());

impl SharedVm {
    pub fn get(driver: Driver) -> anyhow::Result<Self> {
        if node::is_node() {
            return Self::of_this_node(driver);
        }
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(imp) = shared.upgrade() {
            return Ok(Self(imp));
        }
        let imp = Imp::with_busybox(driver)?;
        imp.start_shared()?;
        let imp = Arc::new(imp);
        *shared = Arc::downgrade(&imp);
        Ok(Self(imp))
    }

    /// In a node each test is a process, and the VM is there for all of them; it ends with the node.
    fn of_this_node(driver: Driver) -> anyhow::Result<Self> {
        let folder = Path::new(node::NODE_DISK).join("shared");
        let is_there = folder.exists();
        let mut imp = Imp::in_folder(driver, folder)?;
        imp.ended = true;
        if !is_there {
            imp.import_busybox()?;
            imp.start_shared()?;
        }
        Ok(Self(Arc::new(imp)))
    }

    /// The last one to end checks that nothing is left.
    pub fn end(self) -> anyhow::Result<()> {
        match Arc::into_inner(self.0) {
            Some(imp) if !imp.ended => imp.end(),
            Some(_) | None => Ok(()),
        }
    }
}

impl Deref for SharedVm {
    type Target = Imp;

    fn deref(&self) -> &Imp {
        &self.0
    }
}

impl Drop for Imp {
    fn drop(&mut self) {
        if !self.ended {
            // The test has failed already, and says why.
            let _ = self.clear();
        }
    }
}

/// Waits for a child and all it says; kills it when it takes too long.
pub fn finish(mut child: Child) -> anyhow::Result<Came> {
    let read = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(mut stream) = stream {
                // What was read up to an error is what there is to show.
                let _ = stream.read_to_end(&mut text);
            }
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let stdout = read(child.stdout.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>));
    let stderr = read(child.stderr.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>));
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            let said = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
            bail!("the command took more than {} s\n{}{}", PATIENCE.as_secs(), said.0, said.1);
        }
        std::thread::sleep(LOOK);
    };
    Ok(Came {
        code: status.code(),
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
}

/// Looks again and again; the error says what did not come true.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds()? {
        ensure!(Instant::now() < deadline, "after {} s it is still not so that {what}", PATIENCE.as_secs());
        std::thread::sleep(LOOK);
    }
    Ok(())
}
