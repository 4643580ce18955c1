//! What of this host reaches a guest.

use std::fs::File;
use std::io;
use std::path::Path;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::{Cpu, Vmm};
use sha2::{Digest as _, Sha256};

use super::cpu;
use crate::boot::{self, Kernel};
use crate::ledger::Booted;
use crate::spec::{KernelChoice, NetworkMode};
use crate::status::DriverFacts;
use crate::vm::Context;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostFacts {
    pub kernel: Digest,
    /// Of the agent, and of the kernel's modules.
    pub initramfs: Digest,
    pub vmm: Vmm,
    pub cpu: Cpu,
    pub network: NetworkMode,
}

/// For machines that this driver runs here with this kernel. Blocks on disk I/O.
pub(crate) fn facts(
    context: &Context,
    driver: &DriverFacts,
    kernel: &KernelChoice,
    network: NetworkMode,
) -> Result<HostFacts, boot::Error> {
    let kernel = boot::kernel(&context.layout, kernel)?;
    let initramfs = context.initramfs.path(&context.layout, &kernel, &context.agent)?;
    let Booted { kernel, initramfs } = booted(&kernel, &initramfs)?;
    let vmm = Vmm { name: driver.name.clone(), version: driver.version.clone() };
    Ok(HostFacts { kernel, initramfs, vmm, cpu: cpu::seen_by_guests(driver), network })
}

/// What a guest that boots from these files runs. Blocks on disk I/O.
pub(crate) fn booted(kernel: &Kernel, initramfs: &Path) -> Result<Booted, boot::Error> {
    let named = |name: Option<&str>| name.and_then(|hex| Digest::from_hex(hex).ok());
    // Both are named by what is in them, but for a kernel that was given as a file.
    let kernel = match named(kernel.facts.digest.as_deref()) {
        Some(digest) => digest,
        None => hash(&kernel.facts.path)?,
    };
    let initramfs = match named(initramfs.file_stem().and_then(|stem| stem.to_str())) {
        Some(digest) => digest,
        None => hash(initramfs)?,
    };
    Ok(Booted { kernel, initramfs })
}

fn hash(path: &Path) -> Result<Digest, boot::Error> {
    let mut hash = Sha256::new();
    File::open(path)
        .and_then(|mut file| io::copy(&mut file, &mut hash))
        .map_err(|source| boot::Error::Read { path: path.to_owned(), source })?;
    Ok(Digest::from_bytes(hash.finalize().into()))
}
