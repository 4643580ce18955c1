//! What machines of a template touch until they serve, found out from the first that somebody uses.

use std::sync::Arc;
use std::time::Duration;

use imp_protocol::causes::chain;
use imp_storage::snapshots::Part;
use imp_storage::snapshots::manifest::Kind;
use tokio::time::sleep;

use super::Vm;
use crate::ledger::Origin;
use crate::lifecycle::Phase;
use crate::prefetch::working_set;

/// By then whoever wanted the machine has begun to use it.
const BEGUN: Duration = Duration::from_secs(1);

impl Vm {
    /// Of a machine that has just come to life. Beside its life, and after what somebody waits for.
    pub(super) fn find_out_working_set(&self) {
        let (Phase::Waking, Origin::Snapshot { digest }, Some(vmm)) =
            (&self.phase, &self.record.origin, &self.vmm)
        else {
            return;
        };
        let (digest, vmm) = (*digest, vmm.pid());
        // While this waits, it keeps no runtime from ending: the next one could not have the directory.
        let (context, ended) = (Arc::downgrade(&self.context), self.context.ended.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = ended.cancelled() => return,
                () = sleep(BEGUN) => {}
            }
            let Some(context) = context.upgrade() else { return };
            let found = tokio::task::spawn_blocking(move || {
                let snapshots = context.store.snapshots();
                let memory = snapshots.place(&digest, Part::Memory);
                // The snapshot of a fork is used once.
                let lasts = snapshots.manifest(&digest).is_ok_and(|of| of.description.kind == Kind::Template);
                if lasts && !working_set::is_known(&memory) {
                    return working_set::find_out(&memory, vmm);
                }
                Ok(())
            });
            if let Ok(Err(error)) = found.await {
                tracing::debug!(error = chain(&error), "what a template's machines touch is not known");
            }
        });
    }
}
