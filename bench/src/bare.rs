//! The floor of what a VM could do: the same VMM with the same arguments as a VM of ours, started by nobody but us.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use imp_protocol::connection::{self, Connection};
use serde_json::Value;
use tokio::net::UnixStream;

use crate::machine::{self, Vm};

const PATIENCE: Duration = Duration::from_secs(120);

/// A VMM's command line, taken from one that runs, and a scratch disk as that one had it when it was taken.
pub(crate) struct Template {
    words: Vec<String>,
    scratch: PathBuf,
}

/// A VMM that ends when it is dropped.
pub(crate) struct Bare {
    vmm: Child,
    channel: PathBuf,
}

impl Template {
    /// `folder` keeps the copy of the disk.
    pub(crate) fn take(vm: &Vm, folder: &Path) -> anyhow::Result<Self> {
        let words = machine::command_line(machine::qemu(vm)?)?;
        let disk = words.iter().find_map(|word| scratch_path(word)).context("the VMM has no scratch disk")?;
        let scratch = folder.join("scratch");
        copy_sparse(Path::new(&disk), &scratch)?;
        Ok(Self { words, scratch })
    }

    /// Starts the VMM. `initramfs`: another one than the template's. `folder`: for this machine alone.
    pub(crate) fn boot(&self, folder: &Path, initramfs: Option<&Path>) -> anyhow::Result<Bare> {
        let scratch = folder.join("scratch");
        copy_sparse(&self.scratch, &scratch)?;
        let words = arguments(&self.words, folder, &scratch, initramfs);
        let (program, arguments) = words.split_first().context("a VMM without a command line")?;
        let vmm = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("vmm.log"))?)
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        Ok(Bare { vmm, channel: folder.join("channel") })
    }
}

impl Bare {
    /// The channel, as soon as the VMM offers it.
    pub(crate) async fn channel(&self) -> anyhow::Result<UnixStream> {
        let connected = tokio::time::timeout(PATIENCE, async {
            loop {
                match UnixStream::connect(&self.channel).await {
                    Ok(stream) => return stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        });
        connected.await.context("the VMM offers no channel")
    }

    /// The agent, as soon as it greets back.
    pub(crate) async fn agent(&self) -> anyhow::Result<Connection> {
        let channel = self.channel().await?;
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

/// The template's words with sockets and disk of this machine instead of the descriptors that ours inherits.
fn arguments(words: &[String], folder: &Path, scratch: &Path, initramfs: Option<&Path>) -> Vec<String> {
    let folder = folder.display();
    let mut before = "";
    let mut changed = Vec::new();
    for word in words {
        changed.push(match initramfs {
            Some(path) if before == "-initrd" => path.display().to_string(),
            _ if word.starts_with("socket,id=console,") => format!("file,id=console,path={folder}/console"),
            _ if word.starts_with("socket,id=monitor,") => "null,id=monitor".to_owned(),
            _ if word.starts_with("socket,id=channel,") => {
                format!("socket,id=channel,path={folder}/channel,server=on,wait=off")
            }
            _ if word.starts_with("socket,id=lane,") => "null,id=lane".to_owned(),
            // Of two boots the time is no floor.
            _ if word == "reboot=reset" => "reboot=shutdown".to_owned(),
            _ => with_scratch(word, scratch).unwrap_or_else(|| word.clone()),
        });
        before = word;
    }
    changed
}

/// The path in the block device that is the scratch disk's file.
fn scratch_path(word: &str) -> Option<String> {
    let device: Value = serde_json::from_str(word).ok()?;
    let is_scratch = device.get("node-name")? == "scratch-file";
    is_scratch.then(|| device.get("filename")?.as_str().map(str::to_owned)).flatten()
}

fn with_scratch(word: &str, scratch: &Path) -> Option<String> {
    scratch_path(word)?;
    let mut device: Value = serde_json::from_str(word).ok()?;
    *device.get_mut("filename")? = scratch.display().to_string().into();
    Some(device.to_string())
}

fn copy_sparse(from: &Path, to: &Path) -> anyhow::Result<()> {
    let status = Command::new("cp").arg("--sparse=always").args([from, to]).status()?;
    ensure!(status.success(), "copying {} failed", from.display());
    ensure!(fs::metadata(to)?.len() > 0, "{} is empty", from.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_machine_shares_no_socket_and_no_disk_with_its_template() {
        let words = [
            "qemu",
            "-initrd",
            "/data/initramfs",
            "-chardev",
            "socket,id=console,fd=12,server=on,wait=on",
            "-chardev",
            "socket,id=channel,fd=11,server=on,wait=off",
            "-chardev",
            "socket,id=lane,fd=13,server=on,wait=off",
            "-blockdev",
            r#"{"node-name":"base-file","filename":"/data/base"}"#,
            "-blockdev",
            r#"{"node-name":"scratch-file","filename":"/data/scratch.img"}"#,
        ];
        let words = words.map(str::to_owned);
        let changed =
            arguments(&words, Path::new("/f"), Path::new("/f/scratch"), Some(Path::new("/f/other")));
        let text = changed.join(" ");
        assert_eq!(changed.len(), words.len());
        assert!(
            !text.contains("fd=") && !text.contains("/data/scratch.img") && !text.contains("/data/initramfs")
        );
        assert!(text.contains("/data/base") && text.contains(r#""filename":"/f/scratch""#), "{text}");
        assert!(text.contains("path=/f/channel") && text.contains("-initrd /f/other"), "{text}");
        assert_eq!(scratch_path(&words[12]).unwrap(), "/data/scratch.img");
    }
}
