//! QEMU with a snapshot of ours, asked over its monitor.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::firecracker::{Ended, end};
use super::{Files, Kind, PATIENCE};

/// Before QEMU's own stream: eight bytes that say whose it is, and its digest.
const HEAD: usize = 40;

pub(super) struct Machine {
    vmm: Child,
    monitor: Monitor,
    folder: PathBuf,
}

pub(super) fn load(files: &Files, words: &[String], folder: &Path) -> anyhow::Result<Machine> {
    let words = arguments(words, folder);
    let (program, arguments) = words.split_first().context("a VMM without a command line")?;
    let vmm = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.join("vmm.log"))?)
        .spawn()
        .with_context(|| format!("starting {program}"))?;
    let vmm = Ended(Some(vmm));
    let mut monitor = Monitor::connect(&folder.join("monitor"))?;
    let socket = folder.join("state");
    monitor.execute("migrate-incoming", &json!({"uri": format!("unix:{}", socket.display())}))?;
    let state = fs::read(&files.state)?;
    let mut stream = UnixStream::connect(&socket)?;
    stream.write_all(state.get(HEAD..).context("a state without its head")?)?;
    stream.shutdown(Shutdown::Write)?;
    monitor.migrated()?;
    Ok(Machine { vmm: vmm.kept()?, monitor, folder: folder.to_owned() })
}

impl super::Machine for Machine {
    fn pid(&self) -> u32 {
        self.vmm.id()
    }

    fn resume(&mut self) -> anyhow::Result<()> {
        self.monitor.execute("cont", &json!({}))
    }

    fn channel(&mut self, _patience: Duration) -> anyhow::Result<UnixStream> {
        Ok(UnixStream::connect(self.folder.join("channel"))?)
    }

    fn write_down(&mut self, kind: Kind, folder: &Path) -> anyhow::Result<()> {
        ensure!(kind == Kind::Full, "QEMU writes all of it");
        self.monitor.execute("stop", &json!({}))?;
        let socket = folder.join("written");
        let listener = UnixListener::bind(&socket)?;
        self.monitor.execute("migrate-set-parameters", &json!({"max-bandwidth": 1_u64 << 40}))?;
        self.monitor.execute("migrate", &json!({"uri": format!("unix:{}", socket.display())}))?;
        let (mut stream, _) = listener.accept()?;
        std::io::copy(&mut stream, &mut File::create(folder.join("memory"))?)?;
        self.monitor.migrated()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        end(&mut self.vmm);
    }
}

/// QMP: JSON, a line for each message.
struct Monitor {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    /// How the last migration that was heard of ended.
    migration: Option<String>,
}

impl Monitor {
    fn connect(path: &Path) -> anyhow::Result<Self> {
        let stream = crate::firecracker::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let lines = BufReader::new(stream.try_clone()?);
        let mut monitor = Self { stream, lines, migration: None };
        monitor.next().context("the greeting")?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        let events = json!({"capabilities": [{"capability": "events", "state": true}]});
        monitor.execute("migrate-set-capabilities", &events)?;
        Ok(monitor)
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> anyhow::Result<()> {
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        self.stream.write_all(text.as_bytes())?;
        loop {
            let answer = self.next()?;
            if answer.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
        }
    }

    /// Waits until the machine has been written or read.
    fn migrated(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.migration.take().as_deref() {
                Some("completed") => return Ok(()),
                Some("failed") => bail!("QEMU could not write or read the machine"),
                Some(_) | None => {}
            }
            ensure!(Instant::now() < deadline, "QEMU is late with the machine");
            self.next()?;
        }
    }

    fn next(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        ensure!(self.lines.read_line(&mut line)? > 0, "QEMU ended");
        let message: Value = serde_json::from_str(&line)?;
        if message.get("event").is_some_and(|event| event == "MIGRATION") {
            let status = message.pointer("/data/status").and_then(Value::as_str);
            self.migration = status.map(str::to_owned);
        }
        Ok(message)
    }
}

/// The words of a VM of ours, with sockets and disk of this machine instead of the descriptors that ours inherits.
fn arguments(words: &[String], folder: &Path) -> Vec<String> {
    let folder = folder.display();
    let mut before = "";
    let mut changed = Vec::new();
    for word in words {
        let socket = |id: &str| format!("socket,id={id},path={folder}/{id},server=on,wait=off");
        changed.push(match word.split_once(",fd=").map(|(id, _)| id) {
            _ if before == "-name" => "bare".to_owned(),
            Some("socket,id=console") => format!("file,id=console,path={folder}/console"),
            Some("socket,id=monitor") => socket("monitor"),
            Some("socket,id=channel") => socket("channel"),
            Some("socket,id=lane") => "null,id=lane".to_owned(),
            Some(_) | None => with_scratch(word, &format!("{folder}/scratch.img")).unwrap_or(word.clone()),
        });
        before = word;
    }
    changed
}

/// If it is the block device that is the scratch disk's file.
fn with_scratch(word: &str, scratch: &str) -> Option<String> {
    let mut device: Value = serde_json::from_str(word).ok()?;
    let is_scratch = device.get("node-name")? == "scratch-file";
    *device.get_mut("filename")? = scratch.into();
    is_scratch.then(|| device.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_machine_has_sockets_a_disk_and_a_name_of_its_own() {
        let words = [
            "qemu",
            "-name",
            "imp-00ff",
            "-chardev",
            "socket,id=console,fd=12,server=on,wait=on",
            "-chardev",
            "socket,id=monitor,fd=10,server=on,wait=off",
            "-chardev",
            "socket,id=channel,fd=11,server=on,wait=off",
            "-chardev",
            "socket,id=lane,fd=13,server=on,wait=off",
            "-blockdev",
            r#"{"node-name":"base-file","filename":"/data/base"}"#,
            "-blockdev",
            r#"{"node-name":"scratch-file","filename":"/data/scratch.img"}"#,
        ];
        let text = arguments(&words.map(str::to_owned), Path::new("/f")).join(" ");
        for kept in ["/data/base", "path=/f/monitor", "path=/f/channel", "/f/scratch.img", "-name bare"] {
            assert!(text.contains(kept), "{kept} in {text}");
        }
        for gone in ["fd=", "/data/scratch.img", "imp-00ff"] {
            assert!(!text.contains(gone), "{gone} in {text}");
        }
    }
}
