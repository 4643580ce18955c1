//! Snapshots for those who make VMs of them elsewhere: what one is, and one of a VM that runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::Part;
use imp_storage::snapshots::manifest::Kind;

use super::fork::Written;
use super::{Error, Runtime, WithSecrets, WriteTimes};
use crate::id::VmId;
use crate::restore::Configuration;
use crate::spec::NetworkMode;
use crate::status::Secrets;

/// Why a snapshot was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotKind {
    Template,
    /// Its content was hashed by nobody, and it is good until this machine restarts.
    Fork,
    Suspend,
}

/// What a snapshot is, whose content is as its digest says.
#[derive(Debug, Clone)]
pub struct SnapshotFacts {
    pub kind: SnapshotKind,
    /// What VMs that are made of it have.
    pub network: NetworkMode,
    pub secrets: Secrets,
}

/// A snapshot of a VM that goes on.
#[derive(Debug, Clone)]
pub struct ForkSnapshot {
    pub snapshot: Digest,
    pub times: WriteTimes,
    /// How long it took, from then on, until the VM ran again.
    pub rouse: Duration,
}

impl Runtime {
    /// Where the files of a snapshot are, whether or not it is there.
    pub fn snapshot_directory(&self, snapshot: &Digest) -> PathBuf {
        let mut directory = self.context().store.snapshots().place(snapshot, Part::Memory);
        directory.pop();
        directory
    }

    /// Verifies that a snapshot fits this machine and that its content is as its digest says, and tells what it is. What was
    /// verified once is not read again.
    pub async fn examine_snapshot(&self, snapshot: &Digest) -> Result<SnapshotFacts, Error> {
        let opened = self.opened(snapshot).await?;
        let description = &opened.manifest.description;
        let configuration: Configuration = serde_json::from_value(description.configuration.clone())
            .map_err(|source| Error::Configuration { snapshot: *snapshot, source })?;
        Ok(SnapshotFacts {
            kind: match description.kind {
                Kind::Template => SnapshotKind::Template,
                Kind::Fork => SnapshotKind::Fork,
                Kind::Suspend => SnapshotKind::Suspend,
            },
            // Without a word on it: what this host and its VMM do best, of which nothing is known here.
            network: configuration.spec.network.unwrap_or(NetworkMode::User),
            secrets: configuration.secrets,
        })
    }

    /// A snapshot of a running VM, which goes on whatever becomes of it. It is kept by this name, as by [`Runtime::keep`], until
    /// [`Runtime::let_go`], and goes with the last that uses it: see [`Runtime::forget_fork`].
    pub async fn fork_snapshot(
        &self,
        id: &VmId,
        secrets: WithSecrets,
        by: &str,
    ) -> Result<ForkSnapshot, Error> {
        let (runtime, id, by) = (self.clone(), id.clone(), by.to_owned());
        // Not called off half way with its caller.
        let whole = tokio::spawn(async move {
            let Written { snapshot, times } = runtime.snapshot_for_children(&id, secrets).await?;
            let began = Instant::now();
            let digest = snapshot.digest;
            let kept = runtime.keep(&digest, &by).await;
            drop(snapshot);
            if let Ok(handle) = runtime.handle(&id) {
                runtime.roused(&handle).await;
            }
            match kept {
                Ok(()) => Ok(ForkSnapshot { snapshot: digest, times, rouse: began.elapsed() }),
                Err(error) => {
                    runtime.forget(digest).await;
                    Err(error)
                }
            }
        });
        whole.await.map_err(|_| Error::Ended)?
    }

    /// Takes back what is kept by this name, and removes the snapshots of forks among it that nothing else uses. The others go
    /// with what uses them.
    pub async fn forget_fork(&self, by: &str) -> Result<(), Error> {
        let (context, owner) = (Arc::clone(self.context()), by.to_owned());
        let kept = tokio::task::spawn_blocking(move || context.keeper.kept_for(&context.store, &owner));
        let kept = kept.await.map_err(|_| Error::Ended)??;
        self.let_go(by).await?;
        for snapshot in kept {
            self.forget(snapshot).await;
        }
        Ok(())
    }
}
