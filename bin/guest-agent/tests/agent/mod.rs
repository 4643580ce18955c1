//! An agent in this process, and a host's end of the connection to it.
#![expect(dead_code, reason = "each test file uses a part")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "part of a test, though not a test function")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use imp_guest_agent::{Agent, Surroundings};
use imp_protocol::connection::{self, Connection};
use imp_protocol::guest::exec_input::Input;
use imp_protocol::guest::exec_output::Output;
use imp_protocol::guest::exit_status::How;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::ports_client::PortsClient;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::restore_client::RestoreClient;
use imp_protocol::guest::{ExecInput, ExecOutput, ExitStatus, ProcessSpec};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// A condition that has not come true by then never will.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Host {
    connection: Connection,
    cgroups: Option<std::path::PathBuf>,
    agent: std::sync::Arc<Agent>,
}

impl Host {
    pub(crate) async fn connect() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let hierarchy = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(std::path::Path::new);
        let hierarchy = hierarchy.into_iter().find(|path| path.join("cgroup.procs").exists());
        let cgroups = hierarchy.map(|path| path.join(format!("imp-test-{}-{number}", std::process::id())));
        let agent = Agent::new(Surroundings { cgroups: cgroups.clone(), ..Default::default() }).unwrap();
        let (host, guest) = tokio::net::UnixStream::pair().unwrap();
        tokio::spawn(connection::serve_guest(guest, agent.routes(), "test"));
        let (connection, _) = connection::connect(host, 1).await.unwrap();
        Self { connection, cgroups, agent }
    }

    /// The host's end of a lane of its own.
    pub(crate) fn lane(&self) -> std::os::unix::net::UnixStream {
        let (host, guest) = std::os::unix::net::UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let agent = std::sync::Arc::clone(&self.agent);
        tokio::spawn(async move { agent.serve_lane(guest.into()).await });
        host
    }

    /// The host's end of a stream to the lane, as over vsock, and the agent's work on it.
    pub(crate) fn lane_stream(
        &self,
    ) -> (std::os::unix::net::UnixStream, tokio::task::JoinHandle<std::io::Result<()>>) {
        let (host, guest) = std::os::unix::net::UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let agent = std::sync::Arc::clone(&self.agent);
        let serving = async move { agent.serve_lane_stream(tokio::net::UnixStream::from_std(guest)?).await };
        (host, tokio::spawn(serving))
    }

    pub(crate) fn processes(&self) -> ProcessesClient<Connection> {
        ProcessesClient::new(self.connection.clone())
    }

    pub(crate) fn files(&self) -> FilesClient<Connection> {
        FilesClient::new(self.connection.clone())
    }

    pub(crate) fn ports(&self) -> PortsClient<Connection> {
        PortsClient::new(self.connection.clone())
    }

    pub(crate) fn machine(&self) -> MachineClient<Connection> {
        MachineClient::new(self.connection.clone())
    }

    pub(crate) fn restore(&self) -> RestoreClient<Connection> {
        RestoreClient::new(self.connection.clone())
    }

    pub(crate) async fn exec(&self, spec: ProcessSpec) -> Exec {
        self.exec_with(vec![Input::Start(spec)]).await
    }

    pub(crate) async fn exec_with(&self, first: Vec<Input>) -> Exec {
        let (inputs, stream) = mpsc::channel(16);
        for input in first {
            inputs.send(ExecInput { input: Some(input) }).await.unwrap();
        }
        let outputs = self.processes().exec(ReceiverStream::new(stream)).await.unwrap().into_inner();
        Exec { inputs, outputs, seen: String::new(), stdin_window: 0 }
    }

    /// The status with which an exec is refused.
    pub(crate) async fn refused(&self, spec: ProcessSpec) -> tonic::Status {
        self.exec(spec).await.outputs.message().await.unwrap_err()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let Some(cgroups) = &self.cgroups else { return };
        let _ = std::fs::write(cgroups.join("cgroup.kill"), "1");
        for _ in 0..200 {
            for entry in std::fs::read_dir(cgroups).into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir(entry.path());
            }
            if std::fs::remove_dir(cgroups).is_ok() || !cgroups.exists() {
                return;
            }
            std::thread::yield_now();
        }
    }
}

pub(crate) struct Exec {
    inputs: mpsc::Sender<ExecInput>,
    outputs: Streaming<ExecOutput>,
    seen: String,
    stdin_window: u32,
}

impl Exec {
    pub(crate) async fn send(&mut self, input: Input) {
        self.inputs.send(ExecInput { input: Some(input) }).await.unwrap();
    }

    /// Reads until the output contains `text`, and returns all output so far.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        while !self.seen.contains(text) {
            let output =
                tokio::time::timeout(DEADLINE, self.outputs.message()).await.unwrap().unwrap().unwrap();
            match output.output {
                Some(Output::Stdout(bytes)) => self.seen.push_str(std::str::from_utf8(&bytes).unwrap()),
                Some(Output::Started(started)) => self.stdin_window = started.stdin_window,
                Some(Output::StdinTaken(_)) => {}
                other => panic!("{other:?} before {text:?}"),
            }
        }
        self.seen.clone()
    }

    /// As the agent said it when the process started.
    pub(crate) fn stdin_window(&self) -> u32 {
        self.stdin_window
    }

    /// Reads until so much of the input is taken.
    pub(crate) async fn until_taken(&mut self, bytes: u64) {
        loop {
            let output =
                tokio::time::timeout(DEADLINE, self.outputs.message()).await.unwrap().unwrap().unwrap();
            match output.output {
                Some(Output::StdinTaken(taken)) if taken == bytes => return,
                Some(Output::StdinTaken(taken)) => assert!(taken < bytes, "{taken} of {bytes}"),
                Some(Output::Started(_)) => {}
                other => panic!("{other:?} before {bytes} bytes were taken"),
            }
        }
    }

    pub(crate) async fn first_of(mut exec: Self) -> Output {
        exec.outputs.message().await.unwrap().unwrap().output.unwrap()
    }
}

pub(crate) struct End {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) exit: ExitStatus,
}

impl End {
    pub(crate) fn code(&self) -> Option<u32> {
        match self.exit.how {
            Some(How::Code(code)) => Some(code),
            _ => None,
        }
    }
}

/// Reads to the exit.
pub(crate) async fn collect(mut exec: Exec) -> End {
    let (mut stdout, mut stderr) = (std::mem::take(&mut exec.seen).into_bytes(), Vec::new());
    let mut exit = None;
    let all = async {
        while let Some(output) = exec.outputs.message().await.unwrap() {
            match output.output.unwrap() {
                Output::Stdout(bytes) => stdout.extend_from_slice(&bytes),
                Output::Stderr(bytes) => stderr.extend_from_slice(&bytes),
                Output::Exited(status) => exit = Some(status),
                Output::Started(_) | Output::StdinTaken(_) => {}
                Output::Dropped(bytes) => panic!("{bytes} bytes lost"),
            }
        }
    };
    tokio::time::timeout(DEADLINE, all).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    End { stdout: text(stdout), stderr: text(stderr), exit: exit.expect("a stream ends with an exit") }
}

pub(crate) fn sh(script: &str) -> ProcessSpec {
    let arguments = ["/bin/sh", "-c", script].map(|word| word.to_owned().into());
    ProcessSpec { arguments: arguments.into(), ..Default::default() }
}

pub(crate) async fn until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "the condition did not come true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether a process runs; a zombie does not.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub(crate) fn kill(pid: &str) {
    imp_sys::signals::send(pid.parse().unwrap(), imp_sys::signals::Number::KILL).unwrap();
}
