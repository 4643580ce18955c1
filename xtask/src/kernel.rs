//! Makes a kernel bundle, all that a VM needs from a kernel, out of a Debian kernel package.
//!
//! ```text
//! <bundles>/<digest>/vmlinux       ELF with its loadable segments only: VMMs enter it through its PVH note
//!                    modules.cpio  /modules/<name>.ko; /modules.list: paths of those to load at boot, in order;
//!                                  /containers.list: paths of those that container tools need, in order after them;
//!                                  instead of this, for a node VM of the tests, /modules.index: what to load for which
//!                                  name that the kernel may ask for
//!                    release       what `uname -r` says
//!                    SHA256SUMS    of these three, as sha256sum(1) checks them
//! <bundles>/default -> <digest>
//! ```

mod bzimage;
mod initramfs;
mod modules;
mod vmlinux;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use sha2::{Digest as _, Sha256};

/// Who boots from a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    Guest,
    /// A machine of the tests, which runs guests itself.
    Node,
}

/// Makes the bundle of `package` for `machine`, makes it the default one of `bundles`, and returns its folder.
pub(crate) fn bundle(package: &Path, bundles: &Path, machine: Machine) -> anyhow::Result<PathBuf> {
    let unpacked;
    let root = if package.is_dir() {
        package
    } else {
        unpacked = unpack(package)?;
        unpacked.path()
    };
    let parts = Parts::read(root, machine)?;
    let digest = parts.digest();
    parts.store(bundles, &digest)?;
    make_default(bundles, &digest)?;
    Ok(bundles.join(digest))
}

fn unpack(package: &Path) -> anyhow::Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    let status = Command::new("dpkg-deb").arg("-x").arg(package).arg(folder.path()).status();
    let status = status.context("running dpkg-deb, which belongs to Debian's package dpkg")?;
    ensure!(status.success(), "dpkg-deb could not unpack {}", package.display());
    Ok(folder)
}

struct Parts {
    release: String,
    vmlinux: Vec<u8>,
    modules: Vec<u8>,
}

impl Parts {
    fn read(root: &Path, machine: Machine) -> anyhow::Result<Self> {
        let image = only_entry(&root.join("boot"), "vmlinuz-")?;
        let release = image
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix("vmlinuz-"))
            .context("the kernel's file name is not text")?
            .to_owned();
        let bytes = fs::read(&image).with_context(|| format!("reading {}", image.display()))?;
        let elf = bzimage::payload(&bytes).with_context(|| format!("unpacking {}", image.display()))?;
        let vmlinux = vmlinux::loadable(&elf).context("the kernel's payload")?;
        let tree = [root.join("lib/modules"), root.join("usr/lib/modules")].map(|lib| lib.join(&release));
        let Some(tree) = tree.iter().find(|tree| tree.is_dir()) else {
            bail!("there are no modules of {release} below {}", root.display());
        };
        let modules = match machine {
            Machine::Guest => modules::for_guests(tree)?,
            Machine::Node => modules::for_nodes(tree)?,
        };
        Ok(Self { release, vmlinux, modules })
    }

    fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for part in [self.release.as_bytes(), &self.vmlinux, &self.modules] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex::encode(hash.finalize())
    }

    /// The folder appears whole under its name, or not at all; one whose content is not what its name says is replaced.
    fn store(&self, bundles: &Path, digest: &str) -> anyhow::Result<()> {
        let folder = bundles.join(digest);
        let files = self.files();
        if files.iter().all(|(name, content)| fs::read(folder.join(name)).is_ok_and(|kept| &kept == content))
        {
            return Ok(());
        }
        fs::create_dir_all(bundles).with_context(|| format!("making {}", bundles.display()))?;
        let new = tempfile::Builder::new().prefix(".new-").tempdir_in(bundles)?;
        for (name, content) in &files {
            write_synced(&new.path().join(name), content)?;
        }
        fs::set_permissions(new.path(), PermissionsExt::from_mode(0o755))?;
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
        fs::rename(new.path(), &folder).with_context(|| format!("naming {}", folder.display()))?;
        // It has its name now: there is nothing left to remove.
        let _ = new.keep();
        Ok(())
    }

    /// What the folder holds, by name.
    fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let parts = [
            ("vmlinux", self.vmlinux.clone()),
            ("modules.cpio", self.modules.clone()),
            ("release", format!("{}\n", self.release).into_bytes()),
        ];
        let sums =
            parts.iter().map(|(name, content)| format!("{}  {name}\n", hex::encode(Sha256::digest(content))));
        let sums = sums.collect::<String>().into_bytes();
        parts.into_iter().chain([("SHA256SUMS", sums)]).collect()
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))?;
    fs::File::open(path)?.sync_all().with_context(|| format!("syncing {}", path.display()))
}

fn make_default(bundles: &Path, digest: &str) -> anyhow::Result<()> {
    let new = bundles.join(format!(".default-{}", std::process::id()));
    symlink(digest, &new).with_context(|| format!("making {}", new.display()))?;
    fs::rename(&new, bundles.join("default")).context("naming the default kernel")
}

fn only_entry(folder: &Path, prefix: &str) -> anyhow::Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    match found.as_slice() {
        [one] => Ok(one.clone()),
        several => {
            bail!("{} holds {} files named {prefix}…, one is needed", folder.display(), several.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(release: &str) -> Parts {
        Parts { release: release.to_owned(), vmlinux: b"elf".to_vec(), modules: b"cpio".to_vec() }
    }

    #[test]
    fn a_bundle_is_stored_whole_and_the_newest_is_the_default() {
        let folder = tempfile::tempdir().unwrap();
        for release in ["6.12.1", "6.12.2"] {
            let parts = parts(release);
            parts.store(folder.path(), &parts.digest()).unwrap();
            parts.store(folder.path(), &parts.digest()).unwrap();
            make_default(folder.path(), &parts.digest()).unwrap();
        }
        assert_eq!(fs::read_to_string(folder.path().join("default/release")).unwrap(), "6.12.2\n");
        let names = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 3, "two bundles and the default");
    }

    #[test]
    fn a_damaged_bundle_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let parts = parts("6.12.1");
        let bundle = folder.path().join(parts.digest());
        parts.store(folder.path(), &parts.digest()).unwrap();
        fs::write(bundle.join("vmlinux"), b"el").unwrap();
        parts.store(folder.path(), &parts.digest()).unwrap();
        assert_eq!(fs::read(bundle.join("vmlinux")).unwrap(), b"elf");
        let mut check = Command::new("sha256sum");
        check.args(["--check", "--status", "SHA256SUMS"]).current_dir(bundle);
        assert!(check.status().unwrap().success());
    }

    #[test]
    fn bytes_cannot_move_between_parts_without_changing_the_digest() {
        let moved = Parts { vmlinux: b"el".to_vec(), modules: b"fcpio".to_vec(), ..parts("6.12.1") };
        assert_ne!(moved.digest(), parts("6.12.1").digest());
    }
}
