//! The one entry point: opens a data directory as its only owner, adopts the VMs that live, and runs new ones.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::Part;
use tokio::sync::{broadcast, oneshot, watch};

use crate::admission::{Machine, Need};
use crate::console;
use crate::doctor::{self, Check};
use crate::id::VmId;
use crate::lifecycle::Input;
use crate::logs::{LogQuery, LogReader};
use crate::metering::Template;
use crate::spec::{BridgeSettings, NetworkMode, VmName};
use crate::status::{Event, State, Usage, VmStatus};
use crate::usage::{self, Commitment};
use crate::vm::{Context, Handle, Message};
use crate::vmm::drivers::{DriverChoice, Programs};

mod bring;
mod claim;
mod create;
mod error;
mod fork;
mod keep;
mod open;
mod reach;
mod reclaim;
mod rest;
mod restore;
mod snapshots;
mod suspend;

pub(crate) use create::New;
pub use error::Error;
pub use fork::{ForkRequest, Forked, WithSecrets, WriteTimes};
pub use reclaim::NotReclaimed;
pub use snapshots::{ForkSnapshot, SnapshotFacts, SnapshotKind};
pub use suspend::Suspended;

/// Where things are.
#[derive(Debug, Clone)]
pub struct Config {
    /// Kernels, records, disks, logs: kept over a reboot.
    pub data: PathBuf,
    /// Sockets: gone after a reboot. Short: a socket's whole path has at most 107 bytes.
    pub runtime: PathBuf,
    /// The static binary that becomes /init of every guest.
    pub guest_agent: PathBuf,
    /// What new VMs run in.
    pub driver: DriverChoice,
    /// The Firecracker binary; absent: `firecracker` of PATH, beside this program, or in ../libexec/imp.
    pub firecracker: Option<PathBuf>,
    /// The QEMU binary; absent: `qemu-system-x86_64` of PATH.
    pub qemu: Option<PathBuf>,
    pub bridge: BridgeSettings,
}

/// Owner of all VMs of one data directory. Dropping the last clone leaves the VMs running: the next owner adopts them.
#[derive(Clone)]
pub struct Runtime {
    shared: Arc<Shared>,
}

struct Shared {
    context: Arc<Context>,
    config: Config,
    vms: Mutex<Vms>,
    /// Templates that are being made, by what they are made of.
    builds: Mutex<HashMap<Digest, Arc<tokio::sync::Mutex<()>>>>,
}

#[derive(Default)]
struct Vms {
    handles: HashMap<VmId, Handle>,
    /// Admitted, but not in the ledger yet.
    coming: HashMap<VmId, (VmName, Need, Option<u32>)>,
    /// Of prepared VMs that are about to get another name.
    naming: HashMap<VmId, VmName>,
}

impl Config {
    pub(crate) fn programs(&self) -> Programs {
        Programs { firecracker: self.firecracker.clone(), qemu: self.qemu.clone() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.context.ended.cancel();
    }
}

/// Which VM: its id, a unique prefix of it, or its name.
pub type VmReference = str;

impl Runtime {
    /// Takes the data directory, adopts what lives, cleans up what does not.
    pub async fn open(config: Config) -> Result<Self, Error> {
        open::open(config).await
    }

    /// Starts a created VM; returns at once. [`Runtime::watch`] tells how it goes.
    pub async fn start(&self, id: &VmId) -> Result<(), Error> {
        let handle = self.handle(id)?;
        let state = handle.status.borrow().state;
        if state != State::Created {
            return Err(Error::NotCreated { id: id.clone(), state });
        }
        self.tell(id, &handle, Message::Happened(Input::Start))
    }

    pub fn resolve(&self, reference: &VmReference) -> Result<VmId, Error> {
        let vms = self.vms();
        let by_name =
            vms.handles.iter().find(|(_, handle)| handle.status.borrow().name.as_str() == reference);
        if let Some((id, _)) = by_name {
            return Ok(id.clone());
        }
        let mut fitting =
            vms.handles.keys().filter(|id| !reference.is_empty() && id.as_str().starts_with(reference));
        match (fitting.next(), fitting.next()) {
            (Some(id), None) => Ok(id.clone()),
            (Some(_), Some(_)) => Err(Error::Ambiguous { name: reference.to_owned() }),
            (None, _) => Err(Error::NoSuchVm { name: reference.to_owned() }),
        }
    }

    /// All VMs, stopped ones too, oldest first.
    pub fn list(&self) -> Vec<Arc<VmStatus>> {
        let mut all: Vec<_> = self.vms().handles.values().map(|h| Arc::clone(&h.status.borrow())).collect();
        all.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        all
    }

    pub fn get(&self, id: &VmId) -> Result<Arc<VmStatus>, Error> {
        self.handle(id).map(|handle| Arc::clone(&handle.status.borrow()))
    }

    /// The VM's status now and after each change; ends when the VM is removed.
    pub fn watch(&self, id: &VmId) -> Result<watch::Receiver<Arc<VmStatus>>, Error> {
        self.handle(id).map(|handle| handle.status)
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.shared.context.events.subscribe()
    }

    /// Orderly stop: stop signal, `grace` (absent: the VM's own), kill. Returns when the VM has stopped.
    pub async fn stop(&self, id: &VmId, grace: Option<Duration>) -> Result<Arc<VmStatus>, Error> {
        let handle = self.handle(id)?;
        let grace = grace.unwrap_or_else(|| handle.status.borrow().stop_grace);
        self.awake(id, &handle).await;
        self.until_stopped(id, handle, Input::Stop { grace }).await
    }

    /// Ends the VM at once. Returns when it has stopped.
    pub async fn kill(&self, id: &VmId) -> Result<Arc<VmStatus>, Error> {
        let handle = self.handle(id)?;
        self.until_stopped(id, handle, Input::Kill).await
    }

    async fn until_stopped(
        &self,
        id: &VmId,
        mut handle: Handle,
        input: Input,
    ) -> Result<Arc<VmStatus>, Error> {
        // A VM that was removed when it stopped takes no messages; its last status says so.
        let told = self.tell(id, &handle, Message::Happened(input));
        let last = match handle.status.wait_for(|status| status.state == State::Stopped).await {
            Ok(status) => Some(Arc::clone(&status)),
            Err(_) => None,
        };
        match last {
            Some(status) => Ok(status),
            None => {
                let status = Arc::clone(&handle.status.borrow());
                if status.state == State::Stopped { Ok(status) } else { told.and(Err(Error::Ended)) }
            }
        }
    }

    /// Removes a VM that does not run: record, disk, logs.
    pub async fn remove(&self, id: &VmId) -> Result<(), Error> {
        let handle = self.handle(id)?;
        let (answer, answered) = oneshot::channel();
        self.tell(id, &handle, Message::Remove(answer))?;
        match answered.await {
            Ok(Ok(())) => {
                self.vms().handles.remove(id);
                Ok(())
            }
            Ok(Err(source)) => Err(Error::NotRemoved { id: id.clone(), source }),
            // It removed itself meanwhile.
            Err(_) => Ok(()),
        }
    }

    /// Output of the main process.
    pub async fn logs(&self, id: &VmId, query: LogQuery) -> Result<LogReader, Error> {
        let handle = self.handle(id)?;
        let directory = self.shared.context.layout.vm(id).logs();
        let reader =
            tokio::task::spawn_blocking(move || LogReader::open(&directory, query, Some(handle.log)));
        Ok(reader.await.map_err(|_| Error::Ended)??)
    }

    /// The last lines of the guest's console.
    pub async fn console(&self, id: &VmId) -> Result<Vec<String>, Error> {
        self.handle(id)?;
        let layout = self.shared.context.layout.vm(id);
        let lines = move || console::last_lines(&layout.console(), &layout.earlier_console(), usize::MAX);
        tokio::task::spawn_blocking(lines).await.map_err(|_| Error::Ended)
    }

    pub async fn usage(&self, id: &VmId) -> Result<Usage, Error> {
        let (vmm_pid, made_of) = {
            let handle = self.handle(id)?;
            let status = handle.status.borrow();
            (status.vmm_pid, status.made_of)
        };
        let context = Arc::clone(self.context());
        let layout = context.layout.vm(id);
        let look = move || {
            let memory = made_of.map(|snapshot| context.store.snapshots().place(&snapshot, Part::Memory));
            usage::of_vm(&layout, vmm_pid, memory.and_then(|path| Template::of(&path)))
        };
        tokio::task::spawn_blocking(look).await.map_err(|_| Error::Ended)
    }

    /// Networks that a new VM can be given here, besides none.
    pub fn networks(&self) -> Vec<NetworkMode> {
        self.shared.context.drivers.networks()
    }

    /// What of this machine works, each found out by trying.
    pub async fn doctor(&self) -> Vec<Check> {
        doctor::examine(&self.shared.config).await
    }

    /// What the machine has and what its VMs hold of it.
    pub fn machine(&self) -> Machine {
        let commitments = self.vms().commitments();
        usage::machine(&self.shared.context.layout, &commitments)
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    /// Held by whoever makes this template.
    pub(crate) fn only_build(&self, template: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut builds = self.shared.builds.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody makes, or waits for, any more.
        builds.retain(|_, build| Arc::strong_count(build) > 1);
        Arc::clone(builds.entry(template).or_default())
    }

    fn vms(&self) -> MutexGuard<'_, Vms> {
        let mut vms = self.shared.vms.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that removed themselves when they stopped.
        vms.handles.retain(|_, handle| !handle.messages.is_closed());
        vms
    }

    fn handle(&self, id: &VmId) -> Result<Handle, Error> {
        let mut vms = self.vms();
        let no_such_vm = || Error::NoSuchVm { name: id.to_string() };
        let handle = vms.handles.get(id).cloned().ok_or_else(no_such_vm)?;
        if handle.messages.is_closed() {
            vms.handles.remove(id);
            return Err(no_such_vm());
        }
        Ok(handle)
    }

    fn tell(&self, id: &VmId, handle: &Handle, message: Message) -> Result<(), Error> {
        handle.messages.send(message).map_err(|_| Error::NoSuchVm { name: id.to_string() })
    }
}

impl Vms {
    fn is_taken(&self, name: &VmName) -> bool {
        self.handles.values().any(|handle| handle.status.borrow().name == *name)
            || self.coming.values().any(|(coming, ..)| coming == name)
            || self.naming.values().any(|naming| naming == name)
    }

    /// Also of one that has stopped: what it was given may still be his.
    fn has_user(&self, user: u32) -> bool {
        self.handles.values().any(|handle| handle.status.borrow().vmm_user == Some(user))
            || self.coming.values().any(|(.., coming)| *coming == Some(user))
    }

    fn commitments(&self) -> Vec<(VmId, Commitment)> {
        let living = self.handles.iter().filter_map(|(id, handle)| {
            let status = handle.status.borrow();
            let (scratch, vmm_pid) = (status.scratch.bytes(), status.vmm_pid);
            (status.state != State::Stopped)
                .then(|| (id.clone(), Commitment { memory: handle.memory, scratch, vmm_pid }))
        });
        let coming = self.coming.iter().map(|(id, (_, need, _))| {
            (id.clone(), Commitment { memory: need.memory, scratch: need.scratch, vmm_pid: None })
        });
        living.chain(coming).collect()
    }
}
