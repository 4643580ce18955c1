//! A husk beside a user's own Imp, whose templates it uses.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::imp::{Came, Imp, finish, wait_until};
use crate::machine;

pub struct Husk<'a> {
    imp: &'a Imp,
    /// A folder of the Imp's.
    name: String,
    child: Child,
}

impl<'a> Husk<'a> {
    /// Starts one and waits until it serves. `flags`: those of `husk serve` besides.
    pub fn start(imp: &'a Imp, name: &str, flags: &[&str]) -> anyhow::Result<Self> {
        let mut husk = Self::spawn(imp, name, flags)?;
        wait_until("the husk serves", || {
            if let Some(status) = husk.child.try_wait()? {
                bail!("the husk has ended: {status}\n{}", husk.said()?);
            }
            Ok(UnixStream::connect(husk.socket()).is_ok())
        })?;
        Ok(husk)
    }

    /// Starts one that may end by itself.
    pub fn spawn(imp: &'a Imp, name: &str, flags: &[&str]) -> anyhow::Result<Self> {
        let workdir = imp.folder().join(name);
        fs::create_dir_all(&workdir)?;
        let log = File::options().create(true).append(true).open(log(&workdir))?;
        let mut command = imp.command_of(&machine::husk()?, ["serve"]);
        command.arg("--workdir").arg(&workdir).arg("--control-socket").arg(workdir.join("control.sock"));
        command.arg("--data-dir").arg(imp.data()).args(flags);
        let child = command.stdout(Stdio::null()).stderr(log).spawn()?;
        Ok(Self { imp, name: name.to_owned(), child })
    }

    pub fn workdir(&self) -> PathBuf {
        self.imp.folder().join(&self.name)
    }

    pub fn socket(&self) -> PathBuf {
        self.workdir().join("control.sock")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that husks in this workdir have said.
    pub fn said(&self) -> anyhow::Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(log(&self.workdir()))?).into_owned())
    }

    /// A client's command that is yet to be run.
    pub fn command(&self, op: &str, flags: &[&str]) -> anyhow::Result<Command> {
        let mut command = self.imp.command_of(&machine::husk()?, [op]);
        command.arg("--control-socket").arg(self.socket()).args(flags);
        Ok(command)
    }

    /// What a client's command came to, and the answer that it has printed.
    pub fn ask(&self, op: &str, flags: &[&str]) -> anyhow::Result<(Option<i32>, Value)> {
        answer(&finish(self.command(op, flags)?.spawn()?)?)
    }

    /// The answer to a request that is granted.
    pub fn granted(&self, op: &str, flags: &[&str]) -> anyhow::Result<Value> {
        let (code, answer) = self.ask(op, flags)?;
        ensure!(code == Some(0), "{op}: exit status {code:?}\n{answer}\n{}", self.said()?);
        Ok(answer)
    }

    /// The code of the answer to a request that is not.
    pub fn refused(&self, op: &str, flags: &[&str]) -> anyhow::Result<String> {
        let (code, answer) = self.ask(op, flags)?;
        ensure!(code == Some(1), "{op}: exit status {code:?}\n{answer}");
        Ok(answer.get("code").and_then(Value::as_str).context("no code")?.to_owned())
    }

    /// One field of the status, whatever that says.
    pub fn status(&self, field: &str) -> anyhow::Result<Value> {
        let (_, answer) = self.ask("status", &[])?;
        Ok(answer.get(field).cloned().unwrap_or_default())
    }

    /// Ends it as the kernel would.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        let status = self.child.wait()?;
        ensure!(status.signal() == Some(9), "it had ended before: {status}");
        Ok(())
    }

    /// Tells it to end, and checks that it does so well and leaves nothing in its workdir. All that husks there have said.
    pub fn end(self) -> anyhow::Result<String> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("no pid")?;
        kill_process(pid, Signal::TERM)?;
        let workdir = self.workdir();
        let (status, said) = self.wait()?;
        ensure!(status.code() == Some(0), "{status}\n{said}");
        left_nothing(&workdir)?;
        Ok(said)
    }

    /// Waits for its end.
    pub fn wait(mut self) -> anyhow::Result<(ExitStatus, String)> {
        let mut status = None;
        wait_until("the husk has ended", || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })?;
        Ok((status.context("no status")?, self.said()?))
    }
}

impl Drop for Husk<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // The test has failed already, and says why.
            let _ = i32::try_from(self.pid())
                .ok()
                .and_then(Pid::from_raw)
                .map(|pid| kill_process(pid, Signal::TERM));
            let _ = self.child.wait();
        }
    }
}

/// The answer that a client's command has printed.
pub fn answer(came: &Came) -> anyhow::Result<(Option<i32>, Value)> {
    let answer = serde_json::from_str(&came.stdout);
    Ok((came.code, answer.with_context(|| format!("no answer: {came:?}"))?))
}

/// Whether nothing of a machine is in a workdir.
pub fn left_nothing(workdir: &Path) -> anyhow::Result<()> {
    for name in ["vms", "run/vms", "forks", "fork-records"] {
        let left: Vec<_> = fs::read_dir(workdir.join(name)).into_iter().flatten().flatten().collect();
        ensure!(left.is_empty(), "left in {name}: {left:?}");
    }
    ensure!(!workdir.join("control.sock").exists(), "the socket is left");
    Ok(())
}

fn log(workdir: &Path) -> PathBuf {
    workdir.join("husk.log")
}
