//! VMs that are put away on disk, and go on later, as the machines that they were.
//!
//! ```text
//! Running ─► written down, stands still ─► snapshot hashed and synced ─► the VM ends and goes
//!                     └── failure: it goes on                                  ╎
//!             the snapshot goes with it ◄─ ended ◄─ Running ◄─ a new VM of the same name, prepared and woken
//! ```
//!
//! An owner that is killed before the VM has ended leaves one that goes on, and if there is a snapshot that goes. One that is
//! killed later leaves the snapshot, and what is left of the VM goes. So does a new VM that did not run yet: the snapshot is
//! all that there is, until it is on record that the VM runs.

use std::sync::Arc;
use std::time::SystemTime;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;

use super::{Error, Runtime, WithSecrets};
use crate::id::VmId;
use crate::lifecycle::Input;
use crate::restore::Configuration;
use crate::spec::{Child, Memory, VmName};
use crate::status::{Secrets, VmStatus};
use crate::vm::{Becomes, Message};

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
    /// All that is in its memory is in a file then.
    pub async fn suspend(&self, id: &VmId, secrets: WithSecrets) -> Result<Digest, Error> {
        if self.get(id)?.secrets == Secrets::Held && secrets == WithSecrets::Refused {
            return Err(Error::SecretsOnDisk { id: id.clone() });
        }
        let (runtime, id) = (self.clone(), id.clone());
        // Not called off half way with its caller.
        tokio::spawn(async move { runtime.suspend_whole(&id).await }).await.map_err(|_| Error::Ended)?
    }

    async fn suspend_whole(&self, id: &VmId) -> Result<Digest, Error> {
        let snapshot = match self.written_down(id, Kind::Suspend).await {
            Ok(written) => written.snapshot,
            // It goes on already.
            Err(error @ Error::NotSaved { .. }) => return Err(error),
            Err(error) => {
                // It may stand still, with a snapshot that could not be kept.
                if let Ok(handle) = self.handle(id)
                    && self.tell(id, &handle, Message::Happened(Input::NotKept)).is_ok()
                {
                    self.roused(&handle).await;
                }
                return Err(error);
            }
        };
        let handle = self.handle(id)?;
        self.until_stopped(id, handle, Input::Kept).await?;
        // Somebody may have ended it before.
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

    /// Removes a VM that is put away, for good: the bytes that are free again.
    pub async fn discard(&self, snapshot: &Digest) -> Result<u64, Error> {
        if !self.suspended().await?.iter().any(|one| one.snapshot == *snapshot) {
            return Err(Error::NotSuspended { snapshot: *snapshot });
        }
        let (context, snapshot) = (Arc::clone(self.context()), *snapshot);
        let removed = tokio::task::spawn_blocking(move || context.store.snapshots().remove(&snapshot));
        Ok(removed.await.map_err(|_| Error::Ended)?.map_err(Box::new)?)
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
        self.made_of(kept, child, Becomes::Same).await.map_err(|error| match error {
            // It has no other name to choose.
            Error::NameTaken { name } => Error::NameTakenMeanwhile { name },
            error => error,
        })
    }
}
