//! Where everything is that a node is made of.

use std::env;
use std::path::PathBuf;

use crate::machine::{self, Error};

/// The folder that `./dev setup` has filled for node VMs.
pub fn folder() -> Result<PathBuf, Error> {
    match env::var_os("IMP_TEST_LAB") {
        Some(folder) => Ok(folder.into()),
        None => Ok(machine::cache()?.join("lab")),
    }
}

/// The official Firecracker, under the same path on the host and in nodes.
pub fn firecracker() -> Result<PathBuf, Error> {
    existing(folder()?.join("firecracker/default/firecracker"))
}

/// The jailer of the same release.
pub fn jailer() -> Result<PathBuf, Error> {
    existing(folder()?.join("firecracker/default/jailer"))
}

/// A kernel that nodes boot, and guests in them can; an ELF file.
pub fn kernel() -> Result<PathBuf, Error> {
    existing(folder()?.join("kernels/default/vmlinux"))
}

/// The modules of that kernel, a cpio archive.
pub(super) fn modules() -> Result<PathBuf, Error> {
    existing(folder()?.join("kernels/default/modules.cpio"))
}

/// The static program that is PID 1 of nodes and their guard on the host.
pub(super) fn node_program() -> Result<PathBuf, Error> {
    machine::node_program()
}

/// Names the folder of the programs that `./dev` has built.
pub(super) const PROGRAMS: &str = "IMP_TEST_BIN_DIR";

/// The daemon that shows directories of the host to a node. Debian keeps it out of everybody's way.
pub(super) fn virtiofsd() -> Result<PathBuf, Error> {
    let path = PathBuf::from("/usr/lib/qemu/virtiofsd");
    if path.is_file() {
        return Ok(path);
    }
    Err(Error::Program { program: "virtiofsd".to_owned(), package: "qemu-system-common".to_owned() })
}

fn existing(path: PathBuf) -> Result<PathBuf, Error> {
    if path.exists() { Ok(path) } else { Err(Error::File { path }) }
}
