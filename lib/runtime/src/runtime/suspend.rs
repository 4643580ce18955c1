//! VMs that are put away on disk, and go on later, as the machines that they were.
//!
//! ```text
//! Running ─► written down, stands still ─► snapshot hashed and synced ─► the VM ends and goes
//!                     └── failure: it goes on                                  ╎
//!                                      a new VM of the same name, which goes on as the same machine
//! ```
//!
//! An owner that is killed before the snapshot is safe has left a VM that goes on, and one that is killed after it a snapshot
//! and perhaps the VM; then the VM goes on, and the snapshot goes.

use std::sync::Arc;
use std::time::SystemTime;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;

use super::{Error, Runtime};
use crate::id::VmId;
use crate::restore::Configuration;
use crate::spec::{Child, Memory, VmName};
use crate::status::VmStatus;
use crate::vm::Becomes;

/// A VM that is on disk alone.
#[derive(Debug, Clone)]
pub struct Suspended {
    pub snapshot: Digest,
    pub name: VmName,
    pub image: String,
    pub memory: Memory,
    /// Bytes on disk.
    pub bytes: u64,
    pub since: SystemTime,
}

impl Runtime {
    /// Puts a running VM away on disk, by a snapshot of this digest. Nothing of it runs afterwards, and it is no VM any more:
    /// [`Runtime::wake`] makes one of it. What its main process has said so far goes, but for the last that the guest keeps.
    pub async fn suspend(&self, id: &VmId) -> Result<Digest, Error> {
        let (runtime, id) = (self.clone(), id.clone());
        // Not called off half way with its caller.
        tokio::spawn(async move { runtime.suspend_whole(&id).await }).await.map_err(|_| Error::Ended)?
    }

    async fn suspend_whole(&self, id: &VmId) -> Result<Digest, Error> {
        let (snapshot, _) = match self.written_down(id, Kind::Suspend).await {
            Ok(written) => written,
            // It stands still, if at all, because its user wants it to.
            Err(error @ Error::NotSaved { .. }) => return Err(error),
            Err(error) => {
                // It may stand still, with a snapshot that could not be kept.
                if let Err(error) = self.resume(id).await {
                    tracing::debug!(vm = %id, %error, "it does not have to go on");
                }
                return Err(error);
            }
        };
        self.kill(id).await?;
        self.clear(id).await;
        Ok(snapshot.digest)
    }

    /// VMs that are put away, those used last first.
    pub async fn suspended(&self) -> Result<Vec<Suspended>, Error> {
        let context = Arc::clone(self.context());
        let listed = tokio::task::spawn_blocking(move || context.store.snapshots().list());
        let listed = listed.await.map_err(|_| Error::Ended)?.map_err(Box::new)?;
        let suspended = listed.into_iter().filter_map(|summary| {
            let description = summary.manifest.description;
            let is_away = description.kind == Kind::Suspend && summary.pinned_by.is_empty();
            let Configuration { spec, .. } = serde_json::from_value(description.configuration).ok()?;
            is_away.then_some(Suspended {
                snapshot: summary.digest,
                name: spec.name,
                image: spec.base.image,
                memory: spec.memory,
                bytes: summary.bytes,
                since: summary.made,
            })
        });
        Ok(suspended.collect())
    }

    /// Has a VM go on that was put away, as the same machine, under its name. It stays put away when that fails.
    pub async fn wake(&self, snapshot: &Digest) -> Result<Arc<VmStatus>, Error> {
        let not_suspended = || Error::NotSuspended { snapshot: *snapshot };
        if !self.suspended().await?.iter().any(|one| one.snapshot == *snapshot) {
            return Err(not_suspended());
        }
        // Kept, whatever becomes of the VM, until it runs.
        let kept = self.opened(snapshot).await?;
        let configuration = kept.manifest.description.configuration.clone();
        let Configuration { spec, .. } = serde_json::from_value(configuration)
            .map_err(|source| Error::Configuration { snapshot: *snapshot, source })?;
        let child = Child {
            name: spec.name,
            hostname: Some(spec.hostname),
            labels: spec.labels,
            ports: spec.ports,
            bridge: spec.bridge,
            when_stopped: spec.when_stopped,
        };
        let id = self.prepare_of(kept.clone(), child).await?;
        let woken = self.go_on_as(&id, Becomes::Same).await;
        if woken.is_err() {
            self.clear(&id).await;
        }
        woken
    }
}
