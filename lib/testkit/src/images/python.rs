//! Debian with Python, from the packages that this machine's own apt sources offer.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::{GROUP, PASSWD, PATH, PYTHON};
use crate::machine;
use crate::oci::{Compression, Image, Layer, TIME};

/// Unpacked without running their scripts: enough for programs, and quick.
const PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "coreutils",
    "dash",
    "grep",
    "hostname",
    "iproute2",
    "libpython3-stdlib",
    "procps",
    "python3-minimal",
    "sed",
    "tar",
    "util-linux",
];

/// Where Debian's installer and its images keep the sources of the distribution itself.
const SOURCES: &[&str] = &["/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources"];

const MAIN: &[u8] = include_bytes!("../../assets/main.py");

pub(super) fn layout() -> anyhow::Result<PathBuf> {
    let packages = PACKAGES.join(",");
    super::cache::layout(
        "python",
        &[packages.as_bytes(), MAIN, include_bytes!("python.rs"), PYTHON.as_bytes()],
        |folder| {
            let scratch = tempfile::tempdir()?;
            let debian = scratch.path().join("debian.tar");
            unpack_debian(&packages, &debian)?;
            image(&debian).write_layout(folder, PYTHON).map(drop)
        },
    )
}

fn image(debian: &Path) -> Image {
    let application = Layer::new()
        .directory("srv/app", 0o755)
        .file("srv/app/main.py", 0o644, MAIN)
        .file("etc/passwd", 0o644, PASSWD)
        .file("etc/group", 0o644, GROUP)
        .file("srv/app/index.html", 0o644, b"<h1>served by a guest</h1>\n");
    let removal = Layer::new().whiteout("usr/share/doc").whiteout("usr/share/info");
    Image::new()
        .layer(Layer::from_tar_file(debian))
        .layer(application)
        .layer(removal.compressed(Compression::Zstd))
        .entrypoint(&["python3"])
        .command(&["/srv/app/main.py"])
        .env(PATH)
        .env("PYTHONUNBUFFERED=1")
        .env("PYTHONDONTWRITEBYTECODE=1")
        .user("app")
        .working_directory("/srv/app")
        .exposed_port("8080/tcp")
        .stop_signal("SIGINT")
}

fn unpack_debian(packages: &str, to: &Path) -> anyhow::Result<()> {
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
