//! What the engine knows again from a snapshot, and the snapshots that go with the last VM made of them.

use std::path::PathBuf;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::{Agent, Devices, Kind, Vmm};
use imp_storage::snapshots::{Description, Error, Host};
use imp_storage::store::Store;
use serde::{Deserialize, Serialize};

use crate::id::VmId;
use crate::ledger::{Booted, Origin, Record};
use crate::runtime;
use crate::spec::{KernelChoice, VmSpec};
use crate::status::{AgentFacts, DriverFacts, KernelFacts, Secrets};
use crate::template::cpu;

/// The configuration of a snapshot's manifest. Without the environment of its main process, which lives on in the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Configuration {
    /// Whose memory it is.
    pub vm: VmId,
    pub spec: VmSpec,
    pub kernel: KernelFacts,
    pub agent: AgentFacts,
    pub secrets: Secrets,
}

#[derive(Debug, thiserror::Error)]
pub enum NotDescribed {
    #[error("{key:?} is not the key of a disk")]
    Base { key: String },
    #[error("which kernel and agent it runs is not on record: start it again")]
    Booted,
    #[error("the VM's configuration does not serialise")]
    Configuration(#[from] serde_json::Error),
}

/// What the engine said of the machine when the snapshot was made. Whoever brings a snapshot here may say anything: a machine
/// gets the memory and the processors that are in it.
pub(crate) fn configuration(
    snapshot: Digest,
    description: &Description,
) -> Result<Configuration, runtime::Error> {
    let configuration: Configuration = serde_json::from_value(description.configuration.clone())
        .map_err(|source| runtime::Error::Configuration { snapshot, source })?;
    let spec = &configuration.spec;
    if (spec.cpus.get(), spec.memory.bytes()) != (description.devices.cpus, description.devices.memory) {
        return Err(runtime::Error::Contradiction { snapshot });
    }
    Ok(configuration)
}

/// The kernel that the machine of a snapshot runs.
pub(crate) fn kernel(configuration: &Configuration, description: &Description) -> KernelChoice {
    match configuration.kernel.digest {
        Some(_) => KernelChoice::Bundle(description.kernel.hex()),
        None => KernelChoice::File(configuration.kernel.path.clone()),
    }
}

/// The same, for those who look at a VM that is made of it. Where it is on this host is of no use to that.
pub(crate) fn kernel_facts(configuration: &Configuration, description: &Description) -> KernelFacts {
    let KernelFacts { path, digest, release } = configuration.kernel.clone();
    KernelFacts { path, digest: digest.map(|_| description.kernel.hex()), release }
}

/// What machines that this driver runs here are, for those that decide whether a snapshot fits.
pub(crate) fn host(driver: &DriverFacts) -> Host {
    let vmm = Vmm { name: driver.name.clone(), version: driver.version.clone() };
    Host { vmm, cpu: cpu::seen_by_guests(driver), kernel: None }
}

/// What the manifest of a snapshot of this VM says.
pub(crate) fn description(
    record: &Record,
    kind: Kind,
    template: Option<Digest>,
) -> Result<Description, NotDescribed> {
    let Booted { kernel: booted, initramfs } = record.booted.ok_or(NotDescribed::Booted)?;
    let Host { vmm, cpu, kernel: _ } = host(&record.status.driver);
    let key = &record.spec.base.key;
    let base = key.parse().map_err(|_| NotDescribed::Base { key: key.clone() })?;
    let agent = record
        .status
        .agent
        .clone()
        .unwrap_or(AgentFacts { version: "unknown".to_owned(), kernel_release: String::new() });
    let mut spec = record.spec.clone();
    // Whatever the default is by then.
    spec.kernel = record.status.kernel.choice();
    spec.network = Some(record.status.network.mode);
    // Where things are on this host is nobody's business elsewhere: whoever makes a VM of it looks for them by digest.
    spec.base.path = PathBuf::new();
    spec.mounts = Vec::new();
    let mut kernel = record.status.kernel.clone();
    if kernel.digest.is_some() {
        kernel.path = PathBuf::new();
    }
    let configuration = Configuration {
        vm: record.status.id.clone(),
        spec,
        kernel,
        agent: agent.clone(),
        secrets: record.status.secrets,
    };
    let mac = record.status.network.mac.clone();
    Ok(Description {
        kind,
        template,
        vmm,
        cpu,
        kernel: booted,
        agent: Agent { version: agent.version, digest: initramfs },
        parent: match &record.origin {
            Origin::Boot => None,
            Origin::Snapshot { digest } => Some(*digest),
        },
        devices: Devices {
            cpus: record.spec.cpus.get(),
            memory: record.spec.memory.bytes(),
            network: mac.is_some(),
            mac,
        },
        base,
        configuration: serde_json::to_value(configuration)?,
    })
}

/// What a VM that was made of a snapshot has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CameTo {
    Nothing,
    /// It ran: a snapshot of the same machine is behind it.
    Life,
}

impl CameTo {
    pub(crate) fn of(record: &Record) -> Self {
        // Written down with the stage in which it runs.
        if record.status.started.is_some() { Self::Life } else { Self::Nothing }
    }
}

/// Removes the snapshot that a VM was made of which is no more: that of a fork, when nothing else is made of it, and that of
/// a suspended VM which has gone on.
pub(crate) fn remove_unused(store: &Store, digest: &Digest, vm: CameTo) -> Result<(), Box<Error>> {
    let snapshots = store.snapshots();
    match (snapshots.manifest(digest).map(|manifest| manifest.description.kind), vm) {
        (Ok(Kind::Fork), _) | (Ok(Kind::Suspend), CameTo::Life) => {}
        // It is all that there is of a suspended VM.
        (Ok(Kind::Suspend), CameTo::Nothing) => return Ok(()),
        // Whoever was faster, or what is damaged.
        (Ok(Kind::Template) | Err(_), _) => return Ok(()),
    }
    match snapshots.remove(digest) {
        Ok(_) | Err(Error::InUse { .. } | Error::NoSnapshot(_)) => Ok(()),
        Err(error) => Err(Box::new(error)),
    }
}

/// A VM of which there is a snapshot that it goes on from.
pub(crate) struct Away {
    pub snapshot: Digest,
    pub vm: VmId,
}

/// Removes what an owner left that was killed: snapshots of forks before there was a child, and of VMs that were to be
/// suspended and are among the living. Returns those that are suspended.
pub(crate) fn remove_orphans(store: &Store, living: &[&VmId]) -> Result<Vec<Away>, Box<Error>> {
    let mut away = Vec::new();
    for snapshot in store.snapshots().list().map_err(Box::new)? {
        let description = snapshot.manifest.description;
        let left_by = match description.kind {
            Kind::Template => continue,
            Kind::Fork => CameTo::Nothing,
            Kind::Suspend => {
                let Ok(Configuration { vm, .. }) = serde_json::from_value(description.configuration) else {
                    continue;
                };
                if !living.contains(&&vm) {
                    away.push(Away { snapshot: snapshot.digest, vm });
                    continue;
                }
                CameTo::Life
            }
        };
        if snapshot.pinned_by.is_empty() {
            remove_unused(store, &snapshot.digest, left_by)?;
        }
    }
    Ok(away)
}
