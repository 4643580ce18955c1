//! Children of a VM that runs: one snapshot of it, and each child made of that.
//!
//! ```text
//! parent: Running ─► Sleeping ─► Saving ─► Rousing ─► Running        whatever happens to the rest
//!                                  └─► snapshot ─► children prepared, then activated
//! ```
//!
//! The snapshot is good until this machine restarts, and goes with the last VM that is made of it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;
use imp_storage::snapshots::{Keeping, Snapshot};

use super::{Error, Runtime};
use crate::id::VmId;
use crate::lifecycle::After;
use crate::restore;
use crate::spec::{Child, Identity};
use crate::status::{Secrets, State, VmStatus};
use crate::template::host;
use crate::vm::{RestError, Saved, chain};
use crate::vmm::snapshot::SnapshotKind;

/// Room that a snapshot takes beside memory and disk: the state of devices and processors.
const STATE: u64 = 1 << 20;

#[derive(Debug, Clone)]
pub struct ForkRequest {
    pub children: Vec<(Child, Identity)>,
    pub secrets: WithSecrets,
}

/// Whether children may have the secrets that their parent holds: they are in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithSecrets {
    Refused,
    Allowed,
}

/// What became of a fork. A child that did not come up left nothing.
#[derive(Debug)]
pub struct Forked {
    /// In the order in which they were asked for.
    pub children: Vec<Result<Arc<VmStatus>, Error>>,
    /// How long the parent stood still.
    pub paused: Duration,
}

impl Runtime {
    /// Makes children of a running VM, which goes on whatever becomes of them. They share its memory until they write to it, and
    /// have copies of its disk as it was at that moment. What the parent had open is closed in the children: calls to its
    /// guest, and connections to others. Calls to the parent's guest that are under way end with an error; its processes,
    /// and their connections, go on.
    pub async fn fork(&self, id: &VmId, request: ForkRequest) -> Result<Forked, Error> {
        let (runtime, id) = (self.clone(), id.clone());
        // Not called off half way with its caller, who would leave what nobody knows of.
        tokio::spawn(async move { runtime.fork_whole(&id, request).await }).await.map_err(|_| Error::Ended)?
    }

    async fn fork_whole(&self, id: &VmId, request: ForkRequest) -> Result<Forked, Error> {
        let (snapshot, paused) = self.snapshot_for_children(id, request.secrets).await?;
        let children = request.children.into_iter().map(|(child, identity)| {
            let snapshot = snapshot.clone();
            async move { self.child_of(snapshot, child, identity).await }
        });
        let children = join_all(children).await;
        let digest = snapshot.digest;
        drop(snapshot);
        if children.iter().all(Result::is_err) {
            self.forget(digest).await;
        }
        // Whoever asked finds the parent as it was. It may have ended meanwhile, which is no fault of the fork.
        if let Ok(handle) = self.handle(id) {
            self.roused(&handle).await;
        }
        Ok(Forked { children, paused })
    }

    async fn child_of(
        &self,
        snapshot: Snapshot,
        child: Child,
        identity: Identity,
    ) -> Result<Arc<VmStatus>, Error> {
        let id = self.prepare_of(snapshot, child).await?;
        let activated = self.activate(&id, identity).await;
        if activated.is_err() {
            self.clear(&id).await;
        }
        activated
    }

    /// What children of a running VM are made of.
    async fn snapshot_for_children(
        &self,
        id: &VmId,
        secrets: WithSecrets,
    ) -> Result<(Snapshot, Duration), Error> {
        if self.get(id)?.secrets == Secrets::Held && secrets == WithSecrets::Refused {
            return Err(Error::HoldsSecrets { id: id.clone() });
        }
        self.written_down(id, Kind::Fork).await
    }

    /// A snapshot of a running VM.
    pub(super) async fn written_down(&self, id: &VmId, kind: Kind) -> Result<(Snapshot, Duration), Error> {
        let (after, keeping) = match kind {
            Kind::Suspend => (After::Keep, Keeping::Durable),
            Kind::Fork | Kind::Template => (After::GoOn, Keeping::UntilRestart),
        };
        let status = self.get(id)?;
        if status.state != State::Running && status.state != State::Asleep {
            let source = RestError::NotRunning { state: status.state };
            return Err(Error::NotSaved { id: id.clone(), source });
        }
        let driver = self.shared.context.drivers.of(&status.driver);
        if !driver.capabilities().snapshots.contains(&SnapshotKind::Full) {
            return Err(Error::NoSnapshots { driver: driver.facts().name.clone() });
        }
        let context = Arc::clone(&self.shared.context);
        let bytes = status.memory.bytes() + self.usage(id).await?.scratch_bytes + STATE;
        let draft = tokio::task::spawn_blocking(move || context.store.snapshots().draft(bytes));
        let draft = draft.await.map_err(|_| Error::Ended)?.map_err(Box::new)?;
        let Saved { record, paused } = self.save(id, &draft, after).await?;
        let context = Arc::clone(&self.shared.context);
        let committed = tokio::task::spawn_blocking(move || {
            let (driver, kernel) = (&record.status.driver, record.status.kernel.choice());
            let facts = host::facts(&context, driver, &kernel, record.status.network.mode)?;
            let description = restore::description(&record, kind, None, &facts)?;
            let snapshots = context.store.snapshots();
            Ok::<_, Error>(snapshots.commit(draft, description, keeping).map_err(Box::new)?)
        });
        Ok((committed.await.map_err(|_| Error::Ended)??, paused))
    }

    async fn forget(&self, digest: Digest) {
        let context = Arc::clone(&self.shared.context);
        let removed = tokio::task::spawn_blocking(move || restore::remove_unused(&context.store, &digest));
        if let Ok(Err(error)) = removed.await {
            tracing::error!(error = chain(error.as_ref()), "the snapshot of a fork stays");
        }
    }
}
