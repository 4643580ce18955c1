//! Debian with Python.

use std::path::{Path, PathBuf};

use super::{GROUP, PASSWD, PATH, PYTHON, debian};
use crate::oci::{Compression, Image, Layer};

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

const MAIN: &[u8] = include_bytes!("../../assets/main.py");
const DRAW: &[u8] = include_bytes!("../../assets/draw.py");
/// What tells `draw.py` that it goes on in another machine.
const HOOK: &[u8] = include_bytes!("../../assets/after-restore.d/10-draw");

pub(super) fn layout() -> anyhow::Result<PathBuf> {
    let packages = PACKAGES.join(",");
    super::cache::layout(
        "python",
        &[
            packages.as_bytes(),
            MAIN,
            DRAW,
            HOOK,
            include_bytes!("python.rs"),
            include_bytes!("debian.rs"),
            PYTHON.as_bytes(),
        ],
        |folder| {
            let scratch = tempfile::tempdir()?;
            let debian = scratch.path().join("debian.tar");
            debian::unpack(&packages, &debian)?;
            image(&debian).write_layout(folder, PYTHON).map(drop)
        },
    )
}

fn image(debian: &Path) -> Image {
    let application = Layer::new()
        .directory("srv/app", 0o755)
        .file("srv/app/main.py", 0o644, MAIN)
        .file("srv/app/draw.py", 0o644, DRAW)
        .directory("etc/imp", 0o755)
        .directory("etc/imp/after-restore.d", 0o755)
        .file("etc/imp/after-restore.d/10-draw", 0o755, HOOK)
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
