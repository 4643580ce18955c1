//! The one entry point: opens a data directory as its only owner, adopts the VMs that live, and runs new ones.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use imp_network::spec::VmNetwork;
use tokio::sync::{broadcast, oneshot, watch};

use crate::admission::{Machine, Need, Refusal};
use crate::doctor::{self, Check};
use crate::id::VmId;
use crate::ledger::{self, Record};
use crate::lifecycle::Input;
use crate::logs::{self, LogQuery, LogReader};
use crate::spec::{BridgeSettings, NetworkMode, VmName, VmSpec};
use crate::status::{DriverFacts, Event, KernelFacts, NetworkFacts, State, Usage, VmStatus};
use crate::usage::{self, Commitment};
use crate::vm::{self, Beginning, Context, Handle, Message};
use crate::vmm::Driver;
use crate::vmm::drivers::{DriverChoice, Programs, User};
use crate::{boot, console, network, pins, process, random, vmm};

mod open;
mod reach;

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
}

#[derive(Default)]
struct Vms {
    handles: HashMap<VmId, Handle>,
    /// Admitted, but not in the ledger yet.
    coming: HashMap<VmId, (VmName, Need, Option<u32>)>,
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

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no VM {name:?}; `imp ps -a` lists all")]
    NoSuchVm { name: String },
    #[error("{name:?} fits more than one VM; use more digits of its id")]
    Ambiguous { name: String },
    #[error("there is a VM {name} already: choose another --name, or remove it with `imp rm {name}`")]
    NameTaken { name: VmName },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("VM {id} is {state:?}: only a created VM can be started")]
    NotCreated { id: VmId, state: State },
    #[error("VM {id} is {state:?}: its guest cannot be reached")]
    NotReachable { id: VmId, state: State },
    #[error("VM {id} is not removed")]
    NotRemoved {
        id: VmId,
        #[source]
        source: vm::NotRemoved,
    },
    #[error(transparent)]
    NetworkRefused(#[from] network::Refused),
    #[error("the VM cannot have a bridge network")]
    Bridge(#[from] network::bridge::Error),
    #[error(transparent)]
    Kernel(#[from] boot::Error),
    #[error(transparent)]
    Pins(#[from] pins::Error),
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    #[error(transparent)]
    Logs(#[from] logs::Error),
    #[error("another process owns the VMs in {}", path.display())]
    Owned { path: PathBuf },
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot open the image store")]
    Store(#[source] Box<imp_storage::store::Error>),
    #[error("every user that a VM may run as has one: remove VMs that have stopped with `imp prune`")]
    NoUser,
    #[error(transparent)]
    Driver(#[from] vmm::drivers::Error),
    #[error(transparent)]
    Process(#[from] process::Error),
    #[error("the task was ended")]
    Ended,
}

/// Which VM: its id, a unique prefix of it, or its name.
pub type VmReference = str;

impl Runtime {
    /// Takes the data directory, adopts what lives, cleans up what does not.
    pub async fn open(config: Config) -> Result<Self, Error> {
        open::open(config).await
    }

    /// Admits the VM and writes its record; nothing runs yet. It is given up unless it is started within two minutes.
    pub async fn create(&self, spec: VmSpec) -> Result<VmId, Error> {
        let runtime = self.clone();
        // Not called off half way with its caller, who would leave what it had been promised.
        tokio::spawn(async move { runtime.create_whole(spec).await }).await.map_err(|_| Error::Ended)?
    }

    async fn create_whole(&self, spec: VmSpec) -> Result<VmId, Error> {
        let context = Arc::clone(&self.shared.context);
        let kernel = boot::kernel(&context.layout, &spec.kernel)?.facts;
        let id = VmId::from_random(random::bytes());
        let user = User::of_this_process();
        let driver = context.drivers.for_new(network::asked(spec.network, &spec.bridge), user);
        let memory = spec.memory.bytes() + driver.overhead_bytes();
        let vmm_user = self.admit(&id, &spec, memory, driver.users())?;
        let new = id.clone();
        let written = tokio::task::spawn_blocking(move || -> Result<(Arc<Context>, Record), Error> {
            let (network, bridge) = network_of(&context, driver.as_ref(), user, vmm_user, &new, &spec)?;
            let leased = bridge.is_some();
            let mut status = first_status(&new, &spec, driver.facts().clone(), kernel, network);
            status.vmm_user = vmm_user;
            let record = Record::new(spec, status, bridge);
            if let Err(error) = write_down(&context, &record) {
                if leased {
                    context.bridges.disconnect(&new)?;
                }
                return Err(error);
            }
            Ok((context, record))
        })
        .await;
        let mut vms = self.vms();
        vms.coming.remove(&id);
        let (context, record) = written.map_err(|_| Error::Ended)??;
        vms.handles.insert(id.clone(), vm::run(context, record, Beginning::Created));
        Ok(id)
    }

    /// Promises the memory, the name and a user of its own, if VMs have one, or refuses. Looking at the machine takes a
    /// while, so it comes first.
    fn admit(
        &self,
        id: &VmId,
        spec: &VmSpec,
        memory: u64,
        users: Option<Range<u32>>,
    ) -> Result<Option<u32>, Error> {
        let seen = self.machine();
        let need = Need { memory, cpus: spec.cpus.get(), scratch: spec.scratch.bytes() };
        let mut vms = self.vms();
        let taken = |handle: &Handle| handle.status.borrow().name == spec.name;
        if vms.handles.values().any(taken) || vms.coming.values().any(|(name, ..)| *name == spec.name) {
            return Err(Error::NameTaken { name: spec.name.clone() });
        }
        let commitments = vms.commitments();
        let memory_committed = commitments.iter().map(|(_, c)| c.memory).sum();
        Machine { memory_committed, vms: commitments.len() as u32, ..seen }.admit(need)?;
        let user = match users {
            None => None,
            Some(mut users) => Some(users.find(|user| !vms.has_user(*user)).ok_or(Error::NoUser)?),
        };
        vms.coming.insert(id.clone(), (spec.name.clone(), need, user));
        Ok(user)
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
        let pid = self.handle(id)?.status.borrow().vmm_pid;
        let layout = self.shared.context.layout.vm(id);
        tokio::task::spawn_blocking(move || usage::of_vm(&layout, pid)).await.map_err(|_| Error::Ended)
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

fn write_down(context: &Context, record: &Record) -> Result<(), Error> {
    ledger::create(&context.layout, record)?;
    if let Err(error) = pins::pin(&context.store, &record.spec.base.key, &record.status.id) {
        ledger::remove(&context.layout.vm(&record.status.id))?;
        return Err(error.into());
    }
    Ok(())
}

/// Which network the VM will have. A bridge network has its address from here on.
fn network_of(
    context: &Context,
    driver: &dyn Driver,
    user: User,
    vmm_user: Option<u32>,
    id: &VmId,
    spec: &VmSpec,
) -> Result<(NetworkFacts, Option<VmNetwork>), Error> {
    let mode = network::choose(spec.network, &spec.bridge, &driver.facts().name, driver.networks(), user)?;
    if mode != NetworkMode::Bridge {
        return Ok((network::facts(mode, id, None), None));
    }
    let tap = vmm::tap_owner(vmm_user);
    let (bridge, mtu) = context.bridges.plan(id, &network::mac(id), &spec.bridge, tap)?;
    Ok((network::facts(mode, id, Some((&bridge, mtu))), Some(bridge)))
}

fn first_status(
    id: &VmId,
    spec: &VmSpec,
    driver: DriverFacts,
    kernel: KernelFacts,
    network: NetworkFacts,
) -> VmStatus {
    VmStatus {
        id: id.clone(),
        name: spec.name.clone(),
        image: spec.base.image.clone(),
        base_key: spec.base.key.clone(),
        command: spec.main.arguments.iter().map(|a| String::from_utf8_lossy(a).into_owned()).collect(),
        state: State::Created,
        outcome: None,
        created: SystemTime::now(),
        started: None,
        ended: None,
        vmm_pid: None,
        vmm_user: None,
        driver,
        kernel,
        agent: None,
        cpus: spec.cpus,
        memory: spec.memory,
        scratch: spec.scratch,
        network,
        ports: Vec::new(),
        mounts: spec.mounts.clone(),
        labels: spec.labels.clone(),
        limits: Vec::new(),
        not_enforced: Vec::new(),
        unreachable_since: None,
        stages: Vec::new(),
        stop_grace: spec.stop_grace,
    }
}
