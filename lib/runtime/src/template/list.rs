//! The templates that there are.

use std::sync::Arc;
use std::time::SystemTime;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::Summary;
use imp_storage::snapshots::manifest::Kind;

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
    /// Who maps its memory.
    pub pinned_by: Vec<String>,
}

impl Runtime {
    /// All templates, those used last first. What is damaged is left out.
    pub async fn templates(&self) -> Result<Vec<Template>, Error> {
        let context = Arc::clone(self.context());
        let listed = tokio::task::spawn_blocking(move || context.store.snapshots().list());
        let listed = listed.await.map_err(|_| Error::Ended)?.map_err(Box::new)?;
        Ok(listed.into_iter().filter_map(template).collect())
    }

    /// Removes a template, by the digest of its snapshot, of which no VM is made.
    pub async fn template_remove(&self, snapshot: &Digest) -> Result<u64, Error> {
        let (context, snapshot) = (Arc::clone(self.context()), *snapshot);
        let removed = tokio::task::spawn_blocking(move || context.store.snapshots().remove(&snapshot));
        Ok(removed.await.map_err(|_| Error::Ended)?.map_err(Box::new)?)
    }

    /// Hashes all of a template again, by the digest of its snapshot: an error says what is damaged.
    pub async fn template_verify(&self, snapshot: &Digest) -> Result<(), Error> {
        let (context, snapshot) = (Arc::clone(self.context()), *snapshot);
        let verified = tokio::task::spawn_blocking(move || context.store.snapshots().verify(&snapshot));
        Ok(verified.await.map_err(|_| Error::Ended)?.map_err(Box::new)?)
    }

    /// The snapshot that a text means: digits that its digest begins with.
    pub async fn snapshot(&self, text: &str) -> Result<Digest, Error> {
        let (context, text) = (Arc::clone(self.context()), text.to_owned());
        let resolved = tokio::task::spawn_blocking(move || context.store.snapshots().resolve(&text));
        Ok(resolved.await.map_err(|_| Error::Ended)?.map_err(Box::new)?)
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
