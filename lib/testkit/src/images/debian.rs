//! Debian packages, unpacked, from what this machine's own apt sources offer.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::machine;
use crate::oci::TIME;

/// Where Debian's installer and its images keep the sources of the distribution itself.
const SOURCES: &[&str] = &["/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources"];

/// Writes a tar of these packages and all they depend on, without running their scripts: enough for programs, and quick.
pub(super) fn unpack(packages: &str, to: &Path) -> anyhow::Result<()> {
    let sources: Vec<&str> = SOURCES.iter().copied().filter(|path| Path::new(path).exists()).collect();
    ensure!(!sources.is_empty(), "none of {SOURCES:?} exists: this fixture is made on Debian");
    let output = Command::new(machine::program("mmdebstrap")?)
        .args(["--quiet", "--variant=extract", "--format=tar"])
        .arg(format!("--include={packages}"))
        .arg("")
        .arg(to)
        .args(sources)
        .env("SOURCE_DATE_EPOCH", TIME.to_string())
        .output()
        .context("running mmdebstrap")?;
    ensure!(
        output.status.success(),
        "mmdebstrap could not fetch and unpack {packages}: try again when the package mirror answers \
         (`apt-get update` tells)\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
