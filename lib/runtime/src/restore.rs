//! What the engine knows again from a snapshot, and the snapshots that go with the last VM made of them.

use std::fs::File;
use std::path::Path;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::{Agent, Devices, Kind, Vmm};
use imp_storage::snapshots::{Description, Error, Host};
use imp_storage::store::Store;
use serde::{Deserialize, Serialize};

use crate::id::VmId;
use crate::ledger::{Origin, Record};
use crate::spec::VmSpec;
use crate::status::{AgentFacts, DriverFacts, KernelFacts, Secrets};
use crate::template::HostFacts;
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
    #[error("the VM's configuration does not serialise")]
    Configuration(#[from] serde_json::Error),
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
    facts: &HostFacts,
) -> Result<Description, NotDescribed> {
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
    let configuration = Configuration {
        vm: record.status.id.clone(),
        spec,
        kernel: record.status.kernel.clone(),
        agent: agent.clone(),
        secrets: record.status.secrets,
    };
    let mac = record.status.network.mac.clone();
    Ok(Description {
        kind,
        template,
        vmm: facts.vmm.clone(),
        cpu: facts.cpu.clone(),
        kernel: facts.kernel,
        agent: Agent { version: agent.version, digest: facts.initramfs },
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

/// Has the kernel read what a machine will map, for this process: the memory that it takes is the runtime's, and no VM's that
/// happens to need it first. What is there already stays whose it is.
pub(crate) fn read_ahead(memory: &Path) {
    let advised = File::open(memory)
        .and_then(|file| Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed)?));
    if let Err(error) = advised {
        tracing::debug!(path = %memory.display(), %error, "a snapshot is read when it is needed");
    }
}

/// Removes the snapshot of a fork, or of a VM that was suspended and went on, when nothing is made of it any more.
pub(crate) fn remove_unused(store: &Store, digest: &Digest) -> Result<(), Box<Error>> {
    let snapshots = store.snapshots();
    match snapshots.manifest(digest).map(|manifest| manifest.description.kind) {
        Ok(Kind::Fork | Kind::Suspend) => {}
        // Whoever was faster, or what is damaged.
        Ok(Kind::Template) | Err(_) => return Ok(()),
    }
    match snapshots.remove(digest) {
        Ok(_) | Err(Error::InUse { .. } | Error::NoSnapshot(_)) => Ok(()),
        Err(error) => Err(Box::new(error)),
    }
}

/// Removes what an owner left that was killed: snapshots of forks before there was a child, and of VMs that were to be
/// suspended and live on.
pub(crate) fn remove_orphans(store: &Store, living: &[&VmId]) -> Result<(), Box<Error>> {
    for snapshot in store.snapshots().list().map_err(Box::new)? {
        let description = snapshot.manifest.description;
        let is_orphan = match description.kind {
            Kind::Template => false,
            Kind::Fork => true,
            Kind::Suspend => serde_json::from_value::<Configuration>(description.configuration)
                .is_ok_and(|configuration| living.contains(&&configuration.vm)),
        };
        if is_orphan && snapshot.pinned_by.is_empty() {
            remove_unused(store, &snapshot.digest)?;
        }
    }
    Ok(())
}
