//! The templates that there are.

use std::sync::Arc;
use std::time::SystemTime;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;
use imp_storage::snapshots::{self, Mismatch, Snapshots, Summary};

use crate::restore::Configuration;
use crate::runtime::{Error, Runtime};
use crate::spec::{Cpus, DiskSize, Memory};

/// A line of `imp template ls`.
#[derive(Debug, Clone)]
pub struct Template {
    /// Of all that it was made of; absent: a newer snapshot has been made of the same.
    pub template: Option<Digest>,
    /// What VMs are made of.
    pub snapshot: Digest,
    /// The image as whoever made the template named it.
    pub image: String,
    /// Program and arguments of the main process.
    pub command: String,
    pub vmm: String,
    pub cpus: Cpus,
    pub memory: Memory,
    pub scratch: DiskSize,
    /// Bytes on disk.
    pub bytes: u64,
    pub made: SystemTime,
    pub last_used: SystemTime,
    /// Who maps its memory, and who keeps it: see [`Runtime::keep`].
    pub pinned_by: Vec<String>,
}

impl Runtime {
    /// All templates, those used last first. What is damaged is left out.
    pub async fn templates(&self) -> Result<Vec<Template>, Error> {
        let context = Arc::clone(self.context());
        let listed = tokio::task::spawn_blocking(move || context.store.snapshots().list());
        let listed = listed.await.map_err(|_| Error::Ended)?.map_err(Box::new)?;
        let mut templates: Vec<Template> = listed.into_iter().filter_map(template).collect();
        for owner in templates.iter_mut().flat_map(|template| &mut template.pinned_by) {
            if let Some(bare) = self.context().keeper.bare(owner) {
                *owner = bare.to_owned();
            }
        }
        Ok(templates)
    }

    /// Removes a template, by the digest of its snapshot, of which no VM is made.
    pub async fn template_remove(&self, snapshot: &Digest) -> Result<u64, Error> {
        let (context, snapshot) = (Arc::clone(self.context()), *snapshot);
        let removed = tokio::task::spawn_blocking(move || {
            let snapshots = context.store.snapshots();
            is_template(&snapshots, &snapshot)?;
            Ok(snapshots.remove(&snapshot).map_err(Box::new)?)
        });
        removed.await.map_err(|_| Error::Ended)?
    }

    /// Hashes all of a template again, by the digest of its snapshot: an error says what is damaged.
    pub async fn template_verify(&self, snapshot: &Digest) -> Result<(), Error> {
        let (context, snapshot) = (Arc::clone(self.context()), *snapshot);
        let verified = tokio::task::spawn_blocking(move || {
            let snapshots = context.store.snapshots();
            is_template(&snapshots, &snapshot)?;
            Ok(snapshots.verify(&snapshot).map_err(Box::new)?)
        });
        verified.await.map_err(|_| Error::Ended)?
    }

    /// The snapshot of the template that a text means: digits that its digest begins with. One of a fork or of a VM that is
    /// put away is none: it is somebody's machine.
    pub async fn find_template(&self, text: &str) -> Result<Digest, Error> {
        let (context, text) = (Arc::clone(self.context()), text.to_owned());
        let resolved = tokio::task::spawn_blocking(move || {
            let snapshots = context.store.snapshots();
            let snapshot = snapshots.resolve(&text).map_err(Box::new)?;
            is_template(&snapshots, &snapshot)?;
            Ok(snapshot)
        });
        resolved.await.map_err(|_| Error::Ended)?
    }
}

fn is_template(snapshots: &Snapshots<'_>, snapshot: &Digest) -> Result<(), Error> {
    match snapshots.manifest(snapshot).map(|manifest| manifest.description.kind) {
        Ok(Kind::Template) => Ok(()),
        Ok(Kind::Fork | Kind::Suspend) => Err(Error::NotATemplate { snapshot: *snapshot }),
        // No VM is made of it whatever it was, and so it is found, to be removed.
        Err(snapshots::Error::Refused { reason: Mismatch::DamagedManifest, .. }) => Ok(()),
        Err(error) => Err(Box::new(error).into()),
    }
}

fn template(summary: Summary) -> Option<Template> {
    let description = summary.manifest.description;
    if description.kind != Kind::Template {
        return None;
    }
    let Configuration { spec, .. } = serde_json::from_value(description.configuration).ok()?;
    Some(Template {
        template: summary.templates.first().copied(),
        snapshot: summary.digest,
        image: spec.base.image,
        command: spec.main.arguments.to_string(),
        vmm: format!("{} {}", description.vmm.name, description.vmm.version),
        cpus: spec.cpus,
        memory: spec.memory,
        scratch: spec.scratch,
        bytes: summary.bytes,
        made: summary.made,
        last_used: summary.last_used,
        pinned_by: summary.pinned_by,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use imp_storage::snapshots::manifest::{Agent, Cpu, Devices, Vmm};
    use imp_storage::snapshots::{Description, Keeping, Part};
    use imp_storage::store::{Store, StoreOptions};

    use super::*;

    fn snapshot(store: &Store, kind: Kind) -> Digest {
        let draft = store.snapshots().draft(4096).unwrap();
        for part in [Part::Memory, Part::State, Part::Scratch] {
            fs::write(draft.part(part), [0; 4096]).unwrap();
        }
        let digest = Digest::of(b"something");
        let description = Description {
            kind,
            template: None,
            vmm: Vmm { name: "qemu".into(), version: "7.2".into() },
            cpu: Cpu { vendor: "v".into(), model: "m".into(), features: digest },
            kernel: digest,
            agent: Agent { version: "1".into(), digest },
            parent: None,
            devices: Devices { cpus: 1, memory: 4096, network: false, mac: None },
            base: digest,
            configuration: serde_json::Value::Null,
        };
        store.snapshots().commit(draft, description, Keeping::Durable).unwrap().digest
    }

    #[test]
    fn the_snapshot_of_somebodys_machine_is_no_template() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), StoreOptions::default()).unwrap();
        let snapshots = store.snapshots();
        for kind in [Kind::Fork, Kind::Suspend] {
            let made = snapshot(&store, kind);
            assert!(matches!(
                is_template(&snapshots, &made),
                Err(Error::NotATemplate { snapshot }) if snapshot == made
            ));
        }
        let template = snapshot(&store, Kind::Template);
        assert!(is_template(&snapshots, &template).is_ok());
        // Nothing comes of it, and it can be removed.
        let mut manifest = snapshots.place(&template, Part::Memory);
        manifest.set_file_name("manifest.json");
        fs::write(manifest, "{}").unwrap();
        assert!(is_template(&snapshots, &template).is_ok());
    }
}
