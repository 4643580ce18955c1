//! The slow half: a machine is made of a snapshot, up to the point where only its activation is missing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use imp_runtime::spec::Child;
use imp_runtime::status::{StageName, VmStatus};
use imp_runtime::{Digest, SnapshotKind, VmId};
use tokio::time::Instant;

use crate::husk::{Deadline, Husk};
use crate::lifecycle::{Ask, Outcome};
use crate::network;
use crate::protocol::{Answer, Id, Prepare, Reach, SnapshotRef, Stages, Trust};
use crate::refusal::Refusal;

/// Label of the machines of husks.
pub(crate) const LABEL: &str = "imp.husk";

impl Husk {
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        request: Prepare,
        deadline: Deadline,
    ) -> Result<Answer, Refusal> {
        self.is_called(request.vm.as_ref())?;
        self.may(Ask::Prepare)?;
        let snapshot = self.digest_in(&request.snapshot.directory).await?;
        self.begin(Ask::Prepare)?;
        tracing::info!(snapshot = %snapshot, "preparing a dormant machine");
        let husk = Arc::clone(self);
        let whole = async move {
            let made = husk.make(snapshot, &request.snapshot, request.reach).await;
            husk.over(match &made {
                Ok(_) => Outcome::Prepared(snapshot),
                Err(_) => Outcome::NotPrepared,
            });
            made
        };
        let (_, stages) = self.in_time(deadline, whole, drop).await?;
        tracing::info!(state = "dormant", "dormant");
        Ok(Answer { stages, facts: Some(self.facts()), ..Answer::good() })
    }

    /// The caller has begun an operation, and says what came of it.
    pub(crate) async fn make(
        self: &Arc<Self>,
        snapshot: Digest,
        named: &SnapshotRef,
        reach: Reach,
    ) -> Result<(VmId, Stages), Refusal> {
        let began = Instant::now();
        let facts = self.runtime.examine_snapshot(&snapshot).await;
        let facts = facts.map_err(|error| Refusal::Snapshot(Box::new(error)))?;
        is_trusted(snapshot, facts.kind, named)?;
        let verified = began.elapsed();
        let bridge = network::wishes(facts.network, reach)?;
        let name =
            self.vm.vm_name().ok_or_else(|| Refusal::MachineName { asked: self.vm.as_str().into() })?;
        let labels = BTreeMap::from([(LABEL.to_owned(), self.vm.as_str().to_owned())]);
        let child = Child { labels, bridge, ..Child::named(name) };
        let id = self.runtime.prepare(&snapshot, child).await;
        let id = id.map_err(Refusal::of_preparation)?;
        self.has_machine(&id);
        let mut stages = Stages::default();
        stages.push("verify_prepare", verified);
        of_the_machine(self.vm_status(&id)?.as_ref(), &mut stages);
        stages.push("prepare_total", began.elapsed());
        Ok((id, stages))
    }

    /// A request that names another machine was meant for another husk.
    pub(crate) fn is_called(&self, asked: Option<&Id>) -> Result<(), Refusal> {
        match asked {
            Some(asked) if *asked != self.vm => Err(Refusal::OtherMachine {
                is: self.vm.as_str().to_owned(),
                asked: asked.as_str().to_owned(),
            }),
            Some(_) | None => Ok(()),
        }
    }

    /// The snapshot whose files are in this directory of the store, wherever links lead there from.
    pub(crate) async fn digest_in(&self, directory: &Path) -> Result<Digest, Refusal> {
        let not_here = || Refusal::NotASnapshot { directory: directory.to_owned(), store: self.store() };
        let real = tokio::fs::canonicalize(directory).await.map_err(|_| not_here())?;
        let name = real.file_name().and_then(|name| name.to_str()).ok_or_else(not_here)?;
        let digest = Digest::from_hex(name).map_err(|_| not_here())?;
        let its = tokio::fs::canonicalize(self.runtime.snapshot_directory(&digest)).await;
        if its.is_ok_and(|its| its == real) { Ok(digest) } else { Err(not_here()) }
    }
}

/// Whether a snapshot, whose content is what its digest says, is the one that was meant.
fn is_trusted(is: Digest, kind: SnapshotKind, named: &SnapshotRef) -> Result<(), Refusal> {
    match (kind, named.trust, named.expected) {
        (SnapshotKind::Suspend, ..) => Err(Refusal::Suspended),
        (_, _, Some(expected)) if expected != is => Err(Refusal::OtherDigest { is, expected }),
        (SnapshotKind::Template | SnapshotKind::Fork, _, Some(_)) => Ok(()),
        (SnapshotKind::Fork, Trust::Fork, None) => Ok(()),
        (SnapshotKind::Template, _, None) | (SnapshotKind::Fork, Trust::Digest, None) => {
            Err(Refusal::NotAFork)
        }
    }
}

/// What the engine says of how the machine was made.
fn of_the_machine(vm: &VmStatus, stages: &mut Stages) {
    let mut before = 0;
    for stage in &vm.stages {
        let name = match stage.name {
            StageName::Prepared => "rootfs_clone",
            StageName::Loaded => "vmstate_restore",
            StageName::Spawned
            | StageName::Answered
            | StageName::Configured
            | StageName::MountsCopied
            | StageName::Initialised
            | StageName::MainStarted
            | StageName::Woken => continue,
        };
        stages.push(name, Duration::from_millis(stage.milliseconds.saturating_sub(before)));
        before = stage.milliseconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_trusted_for_its_digest_or_because_this_machine_made_it_for_a_fork() {
        let (one, two) = (Digest::from_bytes([1; 32]), Digest::from_bytes([2; 32]));
        use SnapshotKind as K;
        for (kind, trust, expected, good) in [
            (K::Template, Trust::Digest, Some(one), true),
            (K::Template, Trust::Digest, Some(two), false),
            (K::Template, Trust::Fork, None, false),
            (K::Template, Trust::Fork, Some(one), true),
            (K::Fork, Trust::Fork, None, true),
            (K::Fork, Trust::Digest, None, false),
            (K::Fork, Trust::Fork, Some(two), false),
            (K::Fork, Trust::Digest, Some(one), true),
            (K::Suspend, Trust::Digest, Some(one), false),
            (K::Suspend, Trust::Fork, None, false),
        ] {
            let named = SnapshotRef { directory: "/s".into(), expected, trust };
            assert_eq!(is_trusted(one, kind, &named).is_ok(), good, "{kind:?} {trust:?} {expected:?}");
        }
    }
}
