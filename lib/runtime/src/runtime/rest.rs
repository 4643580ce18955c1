//! VMs that stand still: paused and resumed, and written down while they do.

use std::sync::Arc;
use std::time::Duration;

use imp_storage::snapshots::{Draft, Part};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout;

use super::{Error, Runtime};
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
        // One that was just taken over, or is about to be paused, is not paused yet.
        let mut status = handle.status.clone();
        let settled = status.wait_for(|vm| vm.state != State::Asleep).await.map(drop);
        settled.map_err(|_| Error::NoSuchVm { name: id.to_string() })?;
        let (answer, answered) = oneshot::channel();
        self.tell(id, &handle, Message::Resume(answer))?;
        let answer = answered.await.map_err(|_| Error::Ended)?;
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
        let only = self.quiet(id, &handle).await?;
        let files = SnapshotFiles { state: draft.part(Part::State), memory: draft.part(Part::Memory) };
        let (answer, answered) = oneshot::channel();
        let save = Save { files, scratch: draft.part(Part::Scratch), after, answer, only };
        self.tell(id, &handle, Message::Save(Box::new(save)))?;
        let answer = answered.await.map_err(|_| Error::Ended)?;
        answer.map_err(|source| Error::NotSaved { id: id.clone(), source })
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
