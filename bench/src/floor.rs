//! The floor of what a machine of a snapshot could do: the VMM with the files of ours, asked by nobody but us.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use imp_protocol::connection::{self, Connection};
use imp_protocol::guest::restore_client::RestoreClient;
use imp_protocol::guest::{SameMachine, WakeRequest, wake_request};
use imp_testkit::imp::Driver;
use tokio::time::timeout;

use crate::engine::Engine;
use crate::guest;
use crate::machine::command_line;
use crate::programs::run;

mod firecracker;
mod qemu;

const PATIENCE: Duration = Duration::from_secs(120);
/// A connection that is made while its guest goes on may stay silent for good.
const FIRST_ANSWER: Duration = Duration::from_millis(250);

/// The smallest program.
pub(crate) const NOTHING: &[&str] = &["/bin/true"];

/// What machines of one snapshot are made of.
pub(crate) struct Files {
    pub(crate) base: PathBuf,
    pub(crate) memory: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) scratch: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Full,
    /// What has changed since the machine was loaded.
    Changes,
}

/// Starts machines of one snapshot.
pub(crate) enum Client {
    Firecracker(Files),
    /// With the command line of a VM of ours.
    Qemu(Files, Vec<String>),
}

/// A machine of a snapshot, which ends when it is dropped.
pub(crate) trait Machine {
    fn pid(&self) -> u32;

    fn resume(&mut self) -> anyhow::Result<()>;

    /// A stream to the guest's agent, if it takes one within this time.
    fn channel(&mut self, patience: Duration) -> anyhow::Result<UnixStream>;

    /// Stops the machine and writes memory and state into the folder.
    fn write_down(&mut self, kind: Kind, folder: &Path) -> anyhow::Result<()>;
}

impl Client {
    /// For the snapshot that the VM `like` is made of, or the one of these files.
    pub(crate) fn new(engine: &Engine, files: Files, like: &imp_runtime::VmId) -> anyhow::Result<Self> {
        Ok(match engine.driver() {
            Driver::Firecracker => Self::Firecracker(files),
            Driver::Qemu => Self::Qemu(files, command_line(engine.vmm(like)?)?),
        })
    }

    /// Lays out what a machine needs besides its VMM.
    pub(crate) fn lay_out(&self, folder: &Path) -> anyhow::Result<()> {
        let (Self::Firecracker(files) | Self::Qemu(files, _)) = self;
        run(Command::new("cp").arg("--sparse=always").arg(&files.scratch).arg(folder.join("scratch.img")))?;
        std::os::unix::fs::symlink(&files.base, folder.join("base.img"))?;
        Ok(())
    }

    /// Starts the VMM and has it load the snapshot.
    pub(crate) fn load(&self, folder: &Path) -> anyhow::Result<Box<dyn Machine>> {
        Ok(match self {
            Self::Firecracker(files) => Box::new(firecracker::load(files, folder)?),
            Self::Qemu(files, words) => Box::new(qemu::load(files, words, folder)?),
        })
    }
}

/// The agent, as soon as it greets back.
pub(crate) async fn agent(machine: &mut dyn Machine) -> anyhow::Result<Connection> {
    let mut patience = FIRST_ANSWER;
    let reached = timeout(PATIENCE, async {
        loop {
            if let Ok(stream) = machine.channel(patience) {
                stream.set_nonblocking(true)?;
                let stream = tokio::net::UnixStream::from_std(stream)?;
                if let Ok(Ok((connection, _))) = timeout(patience, connection::connect(stream, 1)).await {
                    return anyhow::Ok(connection);
                }
            }
            patience = (patience * 2).min(Duration::from_secs(4));
            // A refusal comes at once.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    reached.await.context("the bare guest does not greet back")?
}

/// Resumes the machine and has its guest run the smallest program. It is woken as the machine that it was: asleep, it runs
/// none.
pub(crate) async fn first_exec(machine: &mut dyn Machine) -> anyhow::Result<()> {
    machine.resume()?;
    // A connection that is made while its guest goes on may break once.
    let agent = agent(machine).await?;
    let woken = wake(&agent).await;
    let agent = match woken {
        Ok(()) => agent,
        Err(_) => {
            drop(agent);
            let again = self::agent(machine).await?;
            wake(&again).await?;
            again
        }
    };
    guest::exec(&agent, NOTHING).await.map(drop)
}

async fn wake(agent: &Connection) -> anyhow::Result<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let wake = WakeRequest {
        r#as: Some(wake_request::As::Same(SameMachine {})),
        unix_time_nanoseconds: now.as_nanos() as u64,
    };
    RestoreClient::new(agent.clone()).wake(wake).await?;
    Ok(())
}

/// Resumes the machine and has its guest answer, still asleep.
pub(crate) async fn first_answer(machine: &mut dyn Machine) -> anyhow::Result<()> {
    machine.resume()?;
    guest::ping(&agent(machine).await?).await
}
