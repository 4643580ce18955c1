//! VMs that are made of snapshots: prepared until somebody has them, then activated.

use std::sync::Arc;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::Snapshot;
use imp_storage::store::PullPolicy;
use tokio::sync::oneshot;

use super::create::{MadeOf, New};
use super::{Error, Runtime};
use crate::guest::restore::{Generation, MachineId};
use crate::id::VmId;
use crate::ledger::Purpose;
use crate::lifecycle::Input;
use crate::random;
use crate::restore::{self, Configuration};
use crate::spec::{Child, Identity};
use crate::status::{State, VmStatus};
use crate::vm::{Activation, Becomes, Given, Message, chain};

impl Runtime {
    /// Makes a VM of a snapshot, by its digest, up to the point where only [`Runtime::activate`] is missing: network, process,
    /// disk, and memory that is mapped and untouched. Returns when it is [`State::Prepared`]; it stays so until it is
    /// activated or removed, also under another owner.
    pub async fn prepare(&self, snapshot: &Digest, child: Child) -> Result<VmId, Error> {
        let snapshot = self.opened(snapshot).await?;
        self.prepare_of(snapshot, child, Purpose::Serve).await
    }

    /// A VM of a snapshot that is somebody's at once. What does not come up leaves nothing, and what nobody waits for any more
    /// is ended by the next owner.
    pub(super) async fn made_of(
        &self,
        snapshot: Snapshot,
        child: Child,
        becomes: Becomes,
    ) -> Result<Arc<VmStatus>, Error> {
        let id = self.prepare_of(snapshot, child, Purpose::Call).await?;
        let came = self.go_on_as(&id, becomes).await;
        if came.is_err() {
            self.clear(&id).await;
        }
        came
    }

    async fn prepare_of(&self, snapshot: Snapshot, child: Child, purpose: Purpose) -> Result<VmId, Error> {
        let new = New { purpose, ..self.child(snapshot, child)? };
        let id = self.create_new(new).await?;
        let mut handle = self.handle(&id)?;
        self.tell(&id, &handle, Message::Happened(Input::Start))?;
        let status = handle.status.wait_for(|vm| matches!(vm.state, State::Prepared | State::Stopped)).await;
        let status = status.map_err(|_| Error::Ended)?.clone();
        match &status.outcome {
            None => Ok(id),
            Some(outcome) => {
                let outcome = outcome.clone();
                self.clear(&id).await;
                Err(Error::NotPrepared { outcome })
            }
        }
    }

    /// Resumes a prepared VM and has its guest become this machine. Returns when the guest has confirmed its entropy, clock and
    /// identity, and its processes run; a VM whose guest does not is ended.
    pub async fn activate(&self, id: &VmId, identity: Identity) -> Result<Arc<VmStatus>, Error> {
        self.activate_with(id, identity, Given::default()).await
    }

    pub(super) async fn activate_with(
        &self,
        id: &VmId,
        identity: Identity,
        given: Given,
    ) -> Result<Arc<VmStatus>, Error> {
        self.go_on_as(id, new_machine(identity, given)).await
    }

    async fn go_on_as(&self, id: &VmId, becomes: Becomes) -> Result<Arc<VmStatus>, Error> {
        let handle = self.handle(id)?;
        let (answer, answered) = oneshot::channel();
        let activation = Activation { becomes, answer };
        self.tell(id, &handle, Message::Activate(Box::new(activation)))?;
        let answer = answered.await.map_err(|_| Error::Ended)?;
        answer.map_err(|source| Error::NotActivated { id: id.clone(), source })
    }

    /// Whether there can be snapshots of new VMs here.
    pub fn makes_snapshots(&self) -> bool {
        self.shared.context.drivers.make_snapshots()
    }

    /// [`Runtime::prepare`] and [`Runtime::activate`] in a row. What does not come up is removed.
    pub async fn restore(
        &self,
        snapshot: &Digest,
        child: Child,
        identity: Identity,
    ) -> Result<Arc<VmStatus>, Error> {
        let snapshot = self.opened(snapshot).await?;
        self.made_of(snapshot, child, new_machine(identity, Given::default())).await
    }

    /// Removes a VM that nobody was told of and that has stopped, if it has not removed itself.
    pub(super) async fn clear(&self, id: &VmId) {
        match self.remove(id).await {
            Ok(()) | Err(Error::NoSuchVm { .. }) => {}
            Err(error) => tracing::error!(vm = %id, error = chain(&error), "a VM that nobody has stays"),
        }
    }

    pub(super) async fn opened(&self, digest: &Digest) -> Result<Snapshot, Error> {
        let (context, digest) = (Arc::clone(&self.shared.context), *digest);
        let opened = tokio::task::spawn_blocking(move || {
            let snapshots = context.store.snapshots();
            let made_in = snapshots.manifest(&digest).map_err(Box::new)?.description.vmm.name;
            let driver = context.drivers.named(&made_in).ok_or(Error::NoVmm { vmm: made_in })?;
            let opened = snapshots.open(&digest, &restore::host(driver.facts())).map_err(Box::new)?;
            // Which the snapshot keeps, once it is there.
            let base = snapshots.base_disk(&opened.manifest, PullPolicy::Never, &());
            base.map_err(|source| Error::NoBase { snapshot: digest, source: Box::new(source) })?;
            Ok(opened)
        });
        opened.await.map_err(|_| Error::Ended)?
    }

    /// What a VM is that is made of this snapshot.
    fn child(&self, snapshot: Snapshot, child: Child) -> Result<New, Error> {
        let description = &snapshot.manifest.description;
        let configuration = restore::configuration(snapshot.digest, description)?;
        let choice = restore::kernel(&configuration, description);
        let kernel = restore::kernel_facts(&configuration, description);
        let vmm = description.vmm.name.clone();
        let driver = self.shared.context.drivers.named(&vmm).ok_or(Error::NoVmm { vmm })?;
        let Configuration { vm: _, mut spec, kernel: _, agent, secrets } = configuration;
        // What is there, whatever the snapshot says of where it was.
        let base = description.base;
        spec.base.key = base.to_string();
        spec.base.path = self.shared.context.store.disk_path(&base);
        spec.kernel = choice;
        spec.name = child.name;
        spec.labels = child.labels;
        spec.ports = child.ports;
        spec.when_stopped = child.when_stopped;
        spec.bridge = child.bridge;
        spec.mounts = Vec::new();
        let mac = description.devices.mac.clone();
        let hostname = child.hostname;
        let made_of = MadeOf { hostname, mac, agent, kernel, secrets, driver, snapshot };
        Ok(New { spec, made_of: Some(made_of), purpose: Purpose::Serve, initial: Vec::new() })
    }
}

/// A machine that nobody has been before.
pub(super) fn new_machine(identity: Identity, given: Given) -> Becomes {
    let generation = Generation::from_random(random::bytes());
    let machine_id = MachineId::from_random(random::bytes());
    Becomes::New { identity, generation, machine_id, given: Box::new(given) }
}
