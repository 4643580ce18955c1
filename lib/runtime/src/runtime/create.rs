//! How a VM comes into being: admitted, given an address and a user, written down.

use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use imp_network::spec::VmNetwork;
use imp_storage::snapshots::Snapshot;

use super::{Error, Runtime};
use crate::admission::{Machine, Need};
use crate::id::VmId;
use crate::ledger::{self, Booted, Origin, Purpose, Record};
use crate::spec::{Balloon, HostName, NetworkMode, VmSpec};
use crate::status::{AgentFacts, DriverFacts, KernelFacts, NetworkFacts, Secrets, State, VmStatus};
use crate::template::InitCommand;
use crate::vm::{self, Beginning, Context};
use crate::vmm::drivers::User;
use crate::vmm::snapshot::SnapshotKind;
use crate::vmm::{self, Driver};
use crate::{boot, network, random};

/// A VM that is to be.
pub(crate) struct New {
    pub spec: VmSpec,
    /// Absent: it boots.
    pub made_of: Option<MadeOf>,
    pub purpose: Purpose,
    pub initial: Vec<InitCommand>,
}

/// What a VM has from the snapshot that it is made of.
pub(crate) struct MadeOf {
    /// Kept as long as this lives.
    pub snapshot: Snapshot,
    pub driver: Arc<dyn Driver>,
    /// Absent: the VM's id is its name.
    pub hostname: Option<HostName>,
    pub mac: Option<String>,
    pub agent: AgentFacts,
    pub kernel: KernelFacts,
    pub secrets: Secrets,
}

impl New {
    pub(crate) fn booting(spec: VmSpec) -> Self {
        Self { spec, made_of: None, purpose: Purpose::Serve, initial: Vec::new() }
    }

    fn origin(&self) -> Origin {
        match &self.made_of {
            None => Origin::Boot,
            Some(made_of) => Origin::Snapshot { digest: made_of.snapshot.digest },
        }
    }
}

impl Runtime {
    /// Admits the VM and writes its record; nothing runs yet. It is given up unless it is started within two minutes.
    pub async fn create(&self, spec: VmSpec) -> Result<VmId, Error> {
        self.create_new(New::booting(spec)).await
    }

    pub(crate) async fn create_new(&self, new: New) -> Result<VmId, Error> {
        let runtime = self.clone();
        // Not called off half way with its caller, who would leave what it had been promised.
        tokio::spawn(async move { runtime.create_whole(new).await }).await.map_err(|_| Error::Ended)?
    }

    async fn create_whole(&self, new: New) -> Result<VmId, Error> {
        let context = Arc::clone(&self.shared.context);
        let New { spec, initial, .. } = &new;
        let initial = initial.clone();
        let kernel = match &new.made_of {
            Some(made_of) => made_of.kernel.clone(),
            None => boot::kernel(&context.layout, &spec.kernel)?.facts,
        };
        let id = VmId::from_random(random::bytes());
        let user = User::of_this_process();
        let driver = match &new.made_of {
            Some(made_of) => Arc::clone(&made_of.driver),
            None => {
                let network = network::asked(spec.network, &spec.bridge);
                context.drivers.for_new(network, &spec.limits, spec.balloon, user)
            }
        };
        if new.purpose == Purpose::Template && !driver.capabilities().snapshots.contains(&SnapshotKind::Full)
        {
            return Err(Error::NoSnapshots { driver: driver.facts().name.clone() });
        }
        if spec.balloon == Balloon::With && driver.capabilities().balloons == vmm::Possible::No {
            return Err(Error::NoBalloons { driver: driver.facts().name.clone() });
        }
        let memory = vm::need(&new.origin(), spec.memory, driver.as_ref());
        let vmm_user = self.admit(&id, spec, memory, driver.users())?;
        let id_of_new = id.clone();
        let written = tokio::task::spawn_blocking(move || {
            let record = write_down(&context, driver.as_ref(), user, vmm_user, kernel, &id_of_new, new)?;
            Ok::<_, Error>((context, record))
        })
        .await;
        let mut vms = self.vms();
        vms.coming.remove(&id);
        let (context, record) = written.map_err(|_| Error::Ended)??;
        vms.handles.insert(id.clone(), vm::run(context, record, Beginning::Created(initial)));
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
        if vms.is_taken(&spec.name) {
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
}

fn write_down(
    context: &Context,
    driver: &dyn Driver,
    user: User,
    vmm_user: Option<u32>,
    kernel: KernelFacts,
    id: &VmId,
    new: New,
) -> Result<Record, Error> {
    let mac = match &new.made_of {
        // What the guest has found out about its devices stays true. Nobody else is in its network.
        Some(made_of) => made_of.mac.clone().unwrap_or_else(|| network::mac(id)),
        None => network::mac(id),
    };
    let origin = new.origin();
    let New { mut spec, made_of, purpose, .. } = new;
    if let Some(made_of) = &made_of {
        spec.hostname = made_of.hostname.clone().unwrap_or_else(|| HostName::of(id));
    }
    let (network, bridge) = network_of(context, driver, user, vmm_user, id, &spec, &mac)?;
    let leased = bridge.is_some();
    let mut status = first_status(id, &spec, driver.facts().clone(), kernel, network);
    status.vmm_user = vmm_user;
    let mut record = Record::new(spec, status, bridge);
    record.origin = origin;
    record.purpose = purpose;
    if let Some(made_of) = &made_of {
        record.status.secrets = made_of.secrets;
        record.status.made_of = Some(made_of.snapshot.digest);
        record.status.agent = Some(made_of.agent.clone());
        let description = &made_of.snapshot.manifest.description;
        record.booted = Some(Booted { kernel: description.kernel, initramfs: description.agent.digest });
    }
    if let Err(error) = enter(context, &record) {
        if leased {
            context.bridges.disconnect(id)?;
        }
        return Err(error);
    }
    // What it is made of is pinned from here on.
    drop(made_of);
    Ok(record)
}

/// Into the ledger, with all that it needs kept for it.
fn enter(context: &Context, record: &Record) -> Result<(), Error> {
    let id = &record.status.id;
    ledger::create(&context.layout, record)?;
    let pinned =
        context.keeper.pin(&context.store, &record.spec.base.key, id).and_then(|()| match &record.origin {
            Origin::Boot => Ok(()),
            Origin::Snapshot { digest } => context.keeper.pin_snapshot(&context.store, digest, id),
        });
    if let Err(error) = pinned {
        context.keeper.unpin(&context.store, id)?;
        ledger::remove(&context.layout.vm(id))?;
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
    mac: &str,
) -> Result<(NetworkFacts, Option<VmNetwork>), Error> {
    if spec.limits.limits_network() && driver.capabilities().network_limits == vmm::Possible::No {
        return Err(Error::NoNetworkLimits { driver: driver.facts().name.clone() });
    }
    let mode = network::choose(spec.network, &spec.bridge, &driver.facts().name, driver.networks(), user)?;
    if mode != NetworkMode::Bridge {
        return Ok((network::facts(mode, mac, None), None));
    }
    let tap = vmm::tap_owner(vmm_user);
    let (bridge, mtu) = context.bridges.plan(id, mac, &spec.bridge, tap)?;
    Ok((network::facts(mode, mac, Some((&bridge, mtu))), Some(bridge)))
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
        asked: spec.limits.clone(),
        balloon: None,
        lost_output: None,
        unreachable_since: None,
        stages: Vec::new(),
        stop_grace: spec.stop_grace,
        made_of: None,
        secrets: Secrets::None,
        wake: None,
    }
}
