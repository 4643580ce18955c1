//! What a template is made of, and the digest by which it is known: of everything that reaches its guest.

use std::num::NonZeroU16;
use std::time::Duration;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::{Cpu, Vmm};
use serde::{Deserialize, Serialize};

use crate::spec::{
    Arguments, BaseDisk, Cpus, DiskSize, HostName, KernelChoice, Limits, MainProcess, Memory, NetworkMode,
};

mod build;
pub(crate) mod cpu;
mod failed;
mod guest;
pub(crate) mod host;
pub(crate) mod init;
mod list;
mod ready;

pub use build::{BuildStep, Error};
pub use failed::Failed;
pub(crate) use host::HostFacts;
pub use list::Template;

/// What a template is to be made of. Its guest is not told who asked for it, so that whoever asks for the same gets the
/// same.
#[derive(Debug, Clone)]
pub struct TemplateSpec {
    pub base: BaseDisk,
    pub cpus: Cpus,
    pub memory: Memory,
    /// Size of the private writable disk.
    pub scratch: DiskSize,
    /// Absent: what this host and its VMM do best.
    pub network: Option<NetworkMode>,
    pub kernel: KernelChoice,
    pub hostname: HostName,
    /// Lives on in every VM that is made of the template.
    pub main: MainProcess,
    pub limits: Limits,
    /// Run one after the other before the main process starts, with its user, directory and environment.
    pub init: Vec<InitCommand>,
    /// Waited for in this order once the main process has started.
    pub ready: Vec<Readiness>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitCommand {
    pub arguments: Arguments,
    /// It is killed, and the template given up, after this time.
    pub at_most: Duration,
}

/// What shows that a guest is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    pub probe: Probe,
    /// The template is given up after this time.
    pub at_most: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// Exits with 0. Run with the main process's user, directory and environment.
    Command(Arguments),
    /// Takes a connection on the guest's loopback.
    Port(NonZeroU16),
    /// Answers a GET of `path` on the guest's loopback with a status of 200 to 399.
    Http { port: NonZeroU16, path: String },
    /// The main process has printed this, within one line.
    Log(String),
}

/// All that reaches the guest. What is equal in all of it is the same template.
#[derive(Serialize)]
struct Ingredients<'a> {
    /// Of this list.
    format: u32,
    base: &'a str,
    kernel: Digest,
    /// Of the initramfs: the agent, and the kernel's modules.
    initramfs: Digest,
    vmm: &'a Vmm,
    cpu: &'a Cpu,
    cpus: Cpus,
    memory: Memory,
    scratch: DiskSize,
    network: NetworkMode,
    hostname: &'a str,
    main: &'a MainProcess,
    environment: &'a [Vec<u8>],
    limits: &'a Limits,
    init: &'a [InitCommand],
    ready: &'a [Readiness],
}

/// The digest of the template that this host would make.
pub(crate) fn digest(spec: &TemplateSpec, host: &HostFacts) -> Result<Digest, serde_json::Error> {
    let TemplateSpec {
        base,
        cpus,
        memory,
        scratch,
        network: _,
        kernel: _,
        hostname,
        main,
        limits,
        init,
        ready,
    } = spec;
    let ingredients = Ingredients {
        format: 1,
        base: &base.key,
        kernel: host.kernel,
        initramfs: host.initramfs,
        vmm: &host.vmm,
        cpu: &host.cpu,
        cpus: *cpus,
        memory: *memory,
        scratch: *scratch,
        network: host.network,
        hostname: hostname.as_str(),
        main,
        environment: main.environment.expose(),
        limits,
        init,
        ready,
    };
    Ok(Digest::of(&serde_json::to_vec(&ingredients)?))
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
