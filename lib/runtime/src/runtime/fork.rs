//! Children of a VM that runs: one snapshot of it, and each child made of that.
//!
//! ```text
//! parent: Running ─► Sleeping ─► Saving ─► Rousing ─► Running        whatever happens to the rest
//!                                  └─► snapshot ─► children prepared, then activated
//! ```
//!
//! The snapshot is good until this machine restarts, and goes with the last VM that is made of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;
use imp_storage::snapshots::{Keeping, Snapshot};

use super::restore::new_machine;
use super::{Error, Runtime};
use crate::id::VmId;
use crate::lifecycle::After;
use crate::restore::{self, CameTo};
use crate::spec::{Child, Identity};
use crate::status::{Secrets, State, VmStatus};
use crate::vm::{Given, RestError, Saved, chain};
use crate::vmm::snapshot::SnapshotKind;

/// Room that a snapshot takes beside memory and disk: the state of devices and processors.
const STATE: u64 = 1 << 20;
/// Children of one fork that come up at the same time. Each takes a process, a disk and a thread of its host for that.
const AT_ONCE: usize = 8;

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

/// A VM that was written down.
pub(super) struct Written {
    pub(super) snapshot: Snapshot,
    pub(super) times: WriteTimes,
}

/// What it took to write a running VM down, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteTimes {
    /// Its processes were made to stand still.
    pub freeze: Duration,
    /// Its machine stood still, while memory, state and disk were written.
    pub paused: Duration,
    /// What was written became a snapshot.
    pub keep: Duration,
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
        let Written { snapshot, times } = self.snapshot_for_children(id, request.secrets).await?;
        let children = request.children.into_iter().map(|(child, identity)| {
            let snapshot = snapshot.clone();
            async move { self.made_of(snapshot, child, new_machine(identity, Given::default())).await }
        });
        let children = a_few_at_a_time(children).await;
        let digest = snapshot.digest;
        drop(snapshot);
        if children.iter().all(Result::is_err) {
            self.forget(digest).await;
        }
        // Whoever asked finds the parent as it was. It may have ended meanwhile, which is no fault of the fork.
        if let Ok(handle) = self.handle(id) {
            self.roused(&handle).await;
        }
        Ok(Forked { children, paused: times.paused })
    }

    /// What children of a running VM are made of.
    pub(super) async fn snapshot_for_children(
        &self,
        id: &VmId,
        secrets: WithSecrets,
    ) -> Result<Written, Error> {
        if self.get(id)?.secrets == Secrets::Held && secrets == WithSecrets::Refused {
            return Err(Error::HoldsSecrets { id: id.clone() });
        }
        self.written_down(id, Kind::Fork).await
    }

    /// A snapshot of a running VM.
    pub(super) async fn written_down(&self, id: &VmId, kind: Kind) -> Result<Written, Error> {
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
        let began = Instant::now();
        let Saved { record, paused } = self.save(id, &draft, after).await?;
        let saved = began.elapsed();
        let context = Arc::clone(&self.shared.context);
        let committed = tokio::task::spawn_blocking(move || {
            let description = restore::description(&record, kind, None)?;
            let snapshots = context.store.snapshots();
            Ok::<_, Error>(snapshots.commit(draft, description, keeping).map_err(Box::new)?)
        });
        let snapshot = committed.await.map_err(|_| Error::Ended)??;
        let keep = began.elapsed() - saved;
        Ok(Written { snapshot, times: WriteTimes { freeze: saved.saturating_sub(paused), paused, keep } })
    }

    pub(super) async fn forget(&self, digest: Digest) {
        let context = Arc::clone(&self.shared.context);
        let removed = tokio::task::spawn_blocking(move || {
            restore::remove_unused(&context.store, &digest, CameTo::Nothing)
        });
        if let Ok(Err(error)) = removed.await {
            tracing::error!(error = chain(error.as_ref()), "the snapshot of a fork stays");
        }
    }
}

/// What comes of each, in their order.
async fn a_few_at_a_time<T>(tasks: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    stream::iter(tasks).buffered(AT_ONCE).collect().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn of_many_children_a_few_come_up_at_a_time_and_are_told_of_in_order() {
        let (now, most) = (Cell::new(0), Cell::new(0));
        let child = async |number: usize| {
            now.set(now.get() + 1);
            most.set(most.get().max(now.get()));
            // The later ones are the faster ones.
            for _ in number % AT_ONCE..AT_ONCE {
                tokio::task::yield_now().await;
            }
            now.set(now.get() - 1);
            number
        };
        let came = a_few_at_a_time((0..10 * AT_ONCE).map(child)).await;
        assert_eq!(came, (0..10 * AT_ONCE).collect::<Vec<_>>());
        assert_eq!(most.get(), AT_ONCE);
    }
}
