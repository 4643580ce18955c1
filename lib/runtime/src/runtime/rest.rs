//! VMs that stand still: paused and resumed, and written down while they do.

use std::sync::Arc;
use std::time::Duration;

use imp_storage::snapshots::{Draft, Part};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout;

use super::{Error, Runtime};
use crate::changes;
use crate::id::VmId;
use crate::lifecycle::After;
use crate::status::{State, VmStatus};
use crate::vm::{Handle, Message, Save, Saved};
use crate::vmm::snapshot::SnapshotFiles;

/// How long a stop waits for a snapshot that is being made.
const ASLEEP: Duration = Duration::from_secs(60);

impl Runtime {
    /// Freezes the guest's processes and stops its machine, until [`Runtime::resume`]. Its memory stays where it is. Calls to the
    /// guest that are under way end with an error.
    pub async fn pause(&self, id: &VmId) -> Result<Arc<VmStatus>, Error> {
        let handle = self.handle(id)?;
        let _only = self.quiet(id, &handle).await?;
        let (answer, answered) = oneshot::channel();
        self.tell(id, &handle, Message::Pause(answer))?;
        let answer = answered.await.map_err(|_| Error::Ended)?;
        answer.map_err(|source| Error::NotPaused { id: id.clone(), source })
    }

    /// Has a paused VM go on. Its guest's clock is set, and its processes run, when this returns.
    pub async fn resume(&self, id: &VmId) -> Result<Arc<VmStatus>, Error> {
        let handle = self.handle(id)?;
        let no_such_vm = || Error::NoSuchVm { name: id.to_string() };
        // One that was just taken over, or is about to be paused, is not paused yet. One that is being put away is soon no VM any
        // more.
        let mut status = handle.status.clone();
        let settles = status.borrow().state == State::Asleep;
        let settled =
            status.wait_for(|vm| vm.state != State::Asleep && !(settles && vm.state == State::Stopping));
        settled.await.map(drop).map_err(|_| no_such_vm())?;
        let (answer, answered) = oneshot::channel();
        self.tell(id, &handle, Message::Resume(answer))?;
        let answer = answered.await.map_err(|_| no_such_vm())?;
        answer.map_err(|source| Error::NotResumed { id: id.clone(), source })
    }

    /// Waits until nobody else puts the VM to sleep, and it runs.
    pub(super) async fn quiet(&self, id: &VmId, handle: &Handle) -> Result<OwnedSemaphorePermit, Error> {
        let only = Arc::clone(&handle.rest).acquire_owned().await.map_err(|_| Error::Ended)?;
        let mut status = handle.status.clone();
        let awake = status.wait_for(|vm| vm.state != State::Asleep).await;
        awake.map_err(|_| Error::NoSuchVm { name: id.to_string() })?;
        Ok(only)
    }

    /// Writes a running VM down into the draft.
    pub(crate) async fn save(&self, id: &VmId, draft: &Draft, after: After) -> Result<Saved, Error> {
        let handle = self.handle(id)?;
        // Kept, whatever becomes of the VM, until its memory has been copied.
        let made_of = handle.status.borrow().made_of;
        let made_of = match made_of {
            Some(snapshot) => self.opened(&snapshot).await.ok(),
            None => None,
        };
        let _changes = handle.changes.lock().await;
        let only = self.quiet(id, &handle).await?;
        let files = SnapshotFiles { state: draft.part(Part::State), memory: draft.part(Part::Memory) };
        let (answer, answered) = oneshot::channel();
        let save = Save { files, scratch: draft.part(Part::Scratch), after, answer, only };
        self.tell(id, &handle, Message::Save(Box::new(save)))?;
        let answer = answered.await.map_err(|_| Error::Ended)?;
        let saved = answer.map_err(|source| Error::NotSaved { id: id.clone(), source })?;
        if let Some(base) = changes::base(&saved.record) {
            let (context, memory) = (Arc::clone(self.context()), draft.part(Part::Memory));
            let completed = tokio::task::spawn_blocking(move || {
                let _kept = made_of;
                changes::complete(&memory, &context.store.snapshots().place(&base, Part::Memory))
            });
            let completed = completed.await.map_err(|_| Error::Ended)?;
            completed.map_err(|source| Error::NotWhole { id: id.clone(), source })?;
        }
        Ok(saved)
    }

    /// A VM that stands still hears no stop signal: it goes on first.
    pub(super) async fn awake(&self, id: &VmId, handle: &Handle) {
        let state = handle.status.borrow().state;
        if state == State::Paused
            && let Err(error) = self.resume(id).await
        {
            tracing::debug!(vm = %id, %error, "it is ended as it is");
        }
        self.roused(handle).await;
    }

    /// Waits for a VM that was put to sleep to go on, or to end.
    pub(super) async fn roused(&self, handle: &Handle) {
        let mut status = handle.status.clone();
        let _ = timeout(ASLEEP, status.wait_for(|vm| vm.state != State::Asleep)).await;
    }
}
