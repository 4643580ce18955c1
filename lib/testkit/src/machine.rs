//! What a test needs from the machine, and what to do when it is not there.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::node;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{program} is missing: run `./dev setup`, or `apt-get install {package}`")]
    Program { program: String, package: String },
    #[error(
        "{variable} is not set: run the tests by `./dev test`, which builds what they need and says where it is"
    )]
    Variable { variable: &'static str },
    #[error("{path} is missing: run `./dev setup`, then the tests by `./dev test`")]
    File { path: PathBuf },
    #[error("neither XDG_CACHE_HOME nor HOME is set: there is no place for what is built once")]
    Home,
    #[error("{path} could not be made")]
    Make { path: PathBuf, source: std::io::Error },
}

/// The Debian package that has a program which tests run.
const PACKAGES: &[(&str, &str)] = &[
    ("busybox", "busybox-static"),
    ("debugfs", "e2fsprogs"),
    ("docker-registry", "docker-registry"),
    ("dumpe2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("mke2fs", "e2fsprogs"),
    ("mmdebstrap", "mmdebstrap"),
    ("passt", "passt"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("skopeo", "skopeo"),
];

/// Path of a program, looked for where root's programs are, too.
pub fn program(name: &str) -> Result<PathBuf, Error> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(name)).find(|path| path.is_file()).ok_or_else(|| Error::Program {
        program: name.to_owned(),
        package: PACKAGES
            .iter()
            .find_map(|(program, package)| (*program == name).then_some(*package))
            .unwrap_or(name)
            .to_owned(),
    })
}

/// The `imp` that `./dev test` has built.
pub fn imp() -> Result<PathBuf, Error> {
    built("imp")
}

/// The `husk` that `./dev test` has built.
pub fn husk() -> Result<PathBuf, Error> {
    built("husk")
}

/// The static guest agent that `./dev test` has built.
pub fn guest_agent() -> Result<PathBuf, Error> {
    built("guest-agent")
}

/// The static `imp-node` that `./dev test` has built.
pub fn node_program() -> Result<PathBuf, Error> {
    built("imp-node")
}

fn built(name: &str) -> Result<PathBuf, Error> {
    existing(folder_in("IMP_TEST_BIN_DIR")?.join(name))
}

/// The folder of kernel bundles that `./dev setup` has made; `default` in it is the one to boot.
pub fn kernels() -> Result<PathBuf, Error> {
    let kernels = folder_in("IMP_TEST_KERNELS")?;
    existing(kernels.join("default/vmlinux"))?;
    Ok(kernels)
}

/// The same with a kernel that has no driver for VMGENID.
pub fn older_kernels() -> Result<PathBuf, Error> {
    let kernels = folder_in("IMP_TEST_LAB")?.join("older-kernels");
    existing(kernels.join("default/vmlinux"))?;
    Ok(kernels)
}

/// Makes `data` a data directory in which nothing is but the kernels and, in a node, what drivers have found out there, or leaves the one that is there.
pub fn data_directory(data: &Path) -> Result<(), Error> {
    let kernels = kernels()?;
    fs::create_dir_all(data).map_err(|source| Error::Make { path: data.to_owned(), source })?;
    let link = data.join("kernels");
    match symlink(kernels, &link) {
        Err(source) if source.kind() != ErrorKind::AlreadyExists => {
            return Err(Error::Make { path: link, source });
        }
        Ok(()) | Err(_) => {}
    }
    node::lent::to(data).map_err(|source| Error::Make { path: data.to_owned(), source })
}

/// Where what is built once is kept, named by its content.
pub fn cache() -> Result<PathBuf, Error> {
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).ok_or(Error::Home)?;
    Ok(cache.join("imp"))
}

fn folder_in(variable: &'static str) -> Result<PathBuf, Error> {
    env::var_os(variable).map(PathBuf::from).ok_or(Error::Variable { variable })
}

fn existing(path: PathBuf) -> Result<PathBuf, Error> {
    if path.exists() { Ok(path) } else { Err(Error::File { path }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_the_package_that_has_it() {
        let error = program("no-such-program").unwrap_err().to_string();
        assert!(
            error.contains("./dev setup") && error.contains("apt-get install no-such-program"),
            "{error}"
        );
        assert!(program("sh").unwrap().is_file());
    }
}
