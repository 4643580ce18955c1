//! An owner in a process of its own, to be killed or measured: this test program again, told to be one.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

use imp_runtime::spec::{BridgeSettings, Environment, VmSpec};
use imp_runtime::status::{Event, State, VmStatus};
use imp_runtime::{Config, Runtime};
use serde::{Deserialize, Serialize};

use super::host::{self, Host};

const ORDERS: &str = "IMP_TEST_ORDERS";
const MARK: &str = "status: ";

/// What an owner is to do.
#[derive(Serialize, Deserialize)]
struct Orders {
    data: PathBuf,
    runtime: PathBuf,
    guest_agent: PathBuf,
    firecracker: Option<PathBuf>,
    vms: Vec<(VmSpec, Then)>,
    /// Of which VMs are prepared, activated and ended for ever.
    template: Option<VmSpec>,
}

/// What happens to a VM once it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Then {
    LetRun,
    /// With a grace that is longer than any test.
    Stop,
    Exec,
    /// What runs does not hear that it should end, so that the machine takes its time to.
    ExecStubborn,
    /// Again and again.
    Fork,
    /// Once it is deaf.
    Pause,
    /// Again and again.
    SuspendAndWake,
}

#[test]
#[ignore = "not a test: the process that others start to kill it"]
fn owner_process() {
    let orders: Orders =
        serde_json::from_slice(&std::fs::read(std::env::var_os(ORDERS).unwrap()).unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(own(orders));
}

async fn own(orders: Orders) {
    let Orders { data, runtime, guest_agent, firecracker, vms, template } = orders;
    let config = Config {
        data,
        runtime,
        guest_agent,
        driver: crate::DRIVER,
        firecracker,
        qemu: None,
        bridge: BridgeSettings::default(),
    };
    let runtime = Runtime::open(config).await.unwrap();
    let mut events = runtime.subscribe();
    let mut thens = std::collections::HashMap::new();
    if let Some(spec) = template {
        let runtime = runtime.clone();
        drop(tokio::spawn(async move { super::restore::for_ever(&runtime, spec).await }));
    }
    for (mut spec, then) in vms {
        // Orders are on disk, where no environment is kept.
        spec.main.environment = Environment::new(["PATH=/bin"]).unwrap();
        let id = runtime.create(spec).await.unwrap();
        tell(&runtime.get(&id).unwrap());
        runtime.start(&id).await.unwrap();
        thens.insert(id, then);
    }
    loop {
        let Ok(Event::Changed(status)) = events.recv().await else { continue };
        tell(&status);
        if status.state != State::Running {
            continue;
        }
        let (runtime, id) = (runtime.clone(), status.id.clone());
        match thens.insert(id.clone(), Then::LetRun) {
            Some(Then::Stop) => {
                drop(tokio::spawn(async move {
                    host::deaf(&runtime, &id).await;
                    runtime.stop(&id, Some(host::LONG * 10)).await
                }));
            }
            Some(Then::Exec) => {
                drop(tokio::spawn(async move { host::try_exec(&runtime, &id, "touch /in-exec; cat").await }));
            }
            Some(Then::ExecStubborn) => {
                drop(tokio::spawn(async move { host::try_exec(&runtime, &id, host::STUBBORN).await }));
            }
            Some(Then::Fork) => {
                drop(tokio::spawn(async move { super::fork::for_ever(&runtime, &id).await }));
            }
            Some(Then::Pause) => {
                drop(tokio::spawn(async move {
                    host::deaf(&runtime, &id).await;
                    runtime.pause(&id).await
                }));
            }
            Some(Then::SuspendAndWake) => {
                drop(tokio::spawn(async move { super::suspend::for_ever(&runtime, &id).await }));
            }
            Some(Then::LetRun) | None => {}
        }
    }
}

fn tell(status: &VmStatus) {
    println!("{MARK}{}", serde_json::to_string(status).unwrap());
}

/// The process; it ends with this handle.
pub(crate) struct Owner {
    child: Child,
    lines: BufReader<ChildStdout>,
    said: Arc<Mutex<String>>,
    orders: PathBuf,
}

/// As whom an owner runs.
pub(crate) struct User {
    pub program: PathBuf,
    pub uid: u32,
}

impl Owner {
    pub(crate) fn start(host: &Host, config: Config, vms: Vec<(VmSpec, Then)>) -> Self {
        Self::start_as(host, config, vms, None)
    }

    pub(crate) fn of_a_template(host: &Host, template: VmSpec) -> Self {
        Self::with(host, host.config(), Vec::new(), Some(template), None)
    }

    pub(crate) fn start_as(
        host: &Host,
        config: Config,
        vms: Vec<(VmSpec, Then)>,
        user: Option<User>,
    ) -> Self {
        Self::with(host, config, vms, None, user)
    }

    fn with(
        host: &Host,
        config: Config,
        vms: Vec<(VmSpec, Then)>,
        template: Option<VmSpec>,
        user: Option<User>,
    ) -> Self {
        let Config { data, runtime, guest_agent, firecracker, .. } = config;
        // Not below the host's directories: it is none of theirs.
        let orders = host.path().with_extension("orders");
        let text =
            serde_json::to_vec(&Orders { data, runtime, guest_agent, firecracker, vms, template }).unwrap();
        std::fs::write(&orders, text).unwrap();
        let program = user.as_ref().map_or_else(|| std::env::current_exe().unwrap(), |u| u.program.clone());
        let mut command = Command::new(program);
        command
            .args(["--exact", "engine::owner::owner_process", "--ignored", "--nocapture"])
            .env(ORDERS, &orders)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(user) = user.filter(|_| rustix::process::geteuid().is_root()) {
            command.uid(user.uid).gid(user.uid).current_dir("/");
        }
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let said = Arc::new(Mutex::new(String::new()));
        let (mut stderr, told) = (child.stderr.take().unwrap(), Arc::clone(&said));
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = std::io::Read::read_to_string(&mut stderr, &mut text);
            *told.lock().unwrap() = text;
        });
        Self { child, lines, said, orders }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next change of any VM.
    pub(crate) fn next(&mut self) -> VmStatus {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                let _ = self.child.wait();
                panic!("the owner ended: {}", self.said.lock().unwrap());
            }
            // The first stands behind what the test harness says.
            if let Some((_, status)) = line.split_once(MARK) {
                return serde_json::from_str(status).unwrap();
            }
        }
    }

    pub(crate) fn until(&mut self, mut reached: impl FnMut(&VmStatus) -> bool) -> VmStatus {
        loop {
            let status = self.next();
            if reached(&status) {
                return status;
            }
            assert_ne!(status.state, State::Stopped, "{}: {:?}", status.name, status.outcome);
        }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Processor time of all its threads, those that have ended too: fields 14 and 15 of its stat.
    pub(crate) fn processor_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let behind_name = stat.rsplit_once(')').unwrap().1;
        behind_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    }

    /// Resident memory, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        pages * rustix::param::page_size() as u64
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.orders);
    }
}
