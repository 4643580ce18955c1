//! Images made on this machine, without a registry: each once, kept in the cache under the digest of its recipe.

mod cache;
mod debian;
mod python;
mod systemd;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::machine;
use crate::oci::{Image, Layer};

/// What the layouts call the images in them. Nobody has a registry below `.test`: RFC 2606.
pub const PYTHON: &str = "imp.test/python:latest";
pub const BUSYBOX: &str = "imp.test/busybox:latest";
pub const SCRATCH: &str = "imp.test/scratch:latest";
pub const SYSTEMD: &str = "imp.test/systemd:latest";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/srv/app:/bin/sh\n\
    nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &[u8] = b"root:x:0:\napp:x:1000:\nwheel:x:10:app\nnogroup:x:65534:\n";

/// Debian with Python, in three layers: Debian, an application, and the removal of files of the first.
/// Entry point `python3`, command `/srv/app/main.py`, user `app` (1000), port 8080, stop signal SIGINT. `/srv/app/draw.py`
/// draws random numbers, and a hook tells it when it goes on in another machine.
pub fn python() -> anyhow::Result<PathBuf> {
    python::layout()
}

/// Debian whose entry point is its init, `/sbin/init`, which is systemd. One service of its own, `life`, says in `/var/life`
/// that it has started, and on the console that it is stopped in order.
pub fn systemd() -> anyhow::Result<PathBuf> {
    systemd::layout()
}

/// Busybox and its links. Command `sh`, user root, one variable `FIXTURE=busybox`.
pub fn busybox() -> anyhow::Result<PathBuf> {
    let path = machine::program("busybox")?;
    let binary = fs::read(&path)?;
    let list = Command::new(&path).arg("--list-full").output()?;
    ensure!(list.status.success(), "{} --list-full failed", path.display());
    let links = String::from_utf8(list.stdout)?;
    cache::layout("busybox", &[&binary, links.as_bytes(), include_bytes!("images.rs")], |folder| {
        let mut layer = root().file("bin/busybox", 0o755, &binary);
        for link in links.lines().filter(|link| *link != "bin/busybox") {
            layer = layer.symlink(link, "/bin/busybox");
        }
        write(Image::new().layer(layer).command(&["sh"]).env(PATH).env("FIXTURE=busybox"), folder, BUSYBOX)
    })
}

/// One static binary, `/show`, and nothing else: see `assets/show.rs`. Entry point `/show`, user 1000:1000.
pub fn scratch() -> anyhow::Result<PathBuf> {
    let source = include_bytes!("../assets/show.rs");
    cache::layout("scratch", &[source, include_bytes!("images.rs")], |folder| {
        let binary = compile_static(source)?;
        let layer = Layer::new().file("show", 0o755, &binary);
        write(Image::new().layer(layer).entrypoint(&["/show"]).user("1000:1000"), folder, SCRATCH)
    })
}

/// The directories and names that programs expect of a root.
fn root() -> Layer {
    let mut layer = Layer::new();
    for directory in [
        "bin", "dev", "etc", "proc", "root", "run", "sbin", "srv", "sys", "usr", "usr/bin", "usr/sbin", "var",
    ] {
        layer = layer.directory(directory, 0o755);
    }
    layer.directory("tmp", 0o1777).file("etc/passwd", 0o644, PASSWD).file("etc/group", 0o644, GROUP)
}

fn write(image: Image, folder: &Path, name: &str) -> anyhow::Result<()> {
    image.write_layout(folder, name).map(drop)
}

fn compile_static(source: &[u8]) -> anyhow::Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let (from, to) = (folder.path().join("program.rs"), folder.path().join("program"));
    fs::write(&from, source)?;
    let status = Command::new("rustc")
        .args(["--edition", "2024", "--target", "x86_64-unknown-linux-gnu"])
        .args(["-C", "target-feature=+crt-static", "-C", "panic=abort", "-C", "strip=symbols", "-O", "-o"])
        .args([&to, &from])
        .status()
        .context("running rustc")?;
    ensure!(
        status.success(),
        "rustc could not make a static binary: is libc6-dev installed? Run `./dev setup`"
    );
    Ok(fs::read(&to)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest_layers(layout: &Path) -> usize {
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
        let digest = index["manifests"][0]["digest"].as_str().unwrap().replace("sha256:", "");
        let manifest = fs::read(layout.join("blobs/sha256").join(digest)).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        manifest["layers"].as_array().unwrap().len()
    }

    #[test]
    fn busybox_is_one_layer_made_once() {
        let layout = busybox().unwrap();
        assert_eq!(manifest_layers(&layout), 1);
        let made = fs::metadata(layout.join("index.json")).unwrap().modified().unwrap();
        assert_eq!(busybox().unwrap(), layout);
        assert_eq!(fs::metadata(layout.join("index.json")).unwrap().modified().unwrap(), made);
    }

    #[test]
    fn the_program_of_the_scratch_image_needs_no_other_file() {
        let binary = compile_static(include_bytes!("../assets/show.rs")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("show"), &binary).unwrap();
        fs::set_permissions(folder.path().join("show"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let interpreter = binary.windows(4).any(|part| part == b"/ld-");
        assert!(!interpreter, "it asks for a dynamic loader");
        let output = Command::new(folder.path().join("show"))
            .args(["--exit", "7", "a b", "$c"])
            .env_clear()
            .env("NAME", "value")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(7));
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            "argument a b\nargument $c\nvariable NAME=value\n"
        );
        scratch().unwrap();
    }

    #[test]
    fn python_has_three_layers() {
        assert_eq!(manifest_layers(&python().unwrap()), 3);
    }
}
