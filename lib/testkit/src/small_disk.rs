//! A file system as small as a test wants it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;

/// Mounted until it is dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `size` as mount takes it: "700k".
    pub fn mount(path: &Path, size: &str) -> anyhow::Result<Self> {
        mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"], path)?;
        Ok(Self(path.to_owned()))
    }

    pub fn resize(&self, size: &str) -> anyhow::Result<()> {
        mount(&["-o", &format!("remount,size={size}")], &self.0)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A test that has failed may have left somebody in it.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mount(arguments: &[&str], path: &Path) -> anyhow::Result<()> {
    let status = Command::new("mount").args(arguments).arg(path).status()?;
    ensure!(status.success(), "mounting at {} failed: this test must run as root", path.display());
    Ok(())
}
