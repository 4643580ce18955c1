//! Warm pools: for each one a task that keeps so many VMs prepared, and the claims that take them.
//!
//! ```text
//! on record ─► filling ─► as many as it is to have ─► a claim takes one ─► filling …
//!                 └► no VM comes up, or one ends while it waits: waits, longer each time
//! ```
//!
//! Which pool a prepared VM is for is a label of it, so that another owner finds its pools as they are.

mod back_off;
mod keeper;
mod slots;
mod trouble;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imp_protocol::causes::chain;
use imp_runtime::spec::{Child, Claim, Identity, WhenStopped};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::{Digest, NotActivated, Runtime, VmId};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use self::keeper::Keeper;
use self::slots::Slots;
use crate::layout::Layout;
use crate::name::PoolName;
use crate::records::{self, Records};
use crate::report;
use crate::under_way::UnderWay;

/// Label of the VMs of a pool: its name.
pub(crate) const LABEL: &str = "imp.pool";
/// More VMs than one machine keeps prepared.
const LARGEST: u32 = 1000;
/// Whom the template of a pool is kept by, before the pool's name.
const KEPT_BY: &str = "pool-";
/// VMs that a claim tries before it makes one itself.
const MOST_TRIED: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no pool {0:?}; `imp pool ls` lists all")]
    NoSuchPool(String),
    #[error("there is a pool {0} already: choose another name, or remove it with `imp pool rm {0}`")]
    Taken(PoolName),
    #[error("the pool {0} is being made or removed at this moment: try again")]
    Changing(PoolName),
    #[error("a pool of {0} VMs: 1 to {LARGEST} are possible")]
    Size(u32),
    #[error(transparent)]
    Record(#[from] records::Error),
    #[error(transparent)]
    Runtime(#[from] Box<imp_runtime::Error>),
    #[error("the task was ended")]
    Ended,
}

impl From<imp_runtime::Error> for Error {
    fn from(error: imp_runtime::Error) -> Self {
        Self::Runtime(Box::new(error))
    }
}

/// A pool as it is kept on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: PoolName,
    /// As it was asked for.
    pub(crate) template: String,
    pub(crate) snapshot: Digest,
    pub(crate) size: u32,
}

/// A VM that somebody has got.
pub(crate) struct Claimed {
    pub(crate) vm: Arc<VmStatus>,
    pub(crate) was_ready: bool,
}

/// All pools of an owner. Clones share them.
#[derive(Clone)]
pub(crate) struct Pools(Arc<Shared>);

struct Shared {
    runtime: Runtime,
    under_way: UnderWay,
    records: Records<Record>,
    slots: Slots<Keeper>,
    /// VMs that a claim has taken and that are not running yet.
    taken: Mutex<HashSet<VmId>>,
    /// How many claims are under way.
    claims: watch::Sender<usize>,
}

/// A claim that is under way, counted while this lives.
struct Claiming<'a>(&'a watch::Sender<usize>);

impl<'a> Claiming<'a> {
    fn begin(claims: &'a watch::Sender<usize>) -> Self {
        claims.send_modify(|claims| *claims += 1);
        Self(claims)
    }
}

impl Drop for Claiming<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|claims| *claims -= 1);
    }
}

impl Pools {
    /// Those on record go on. What is left of others goes: their removal, or their making, was cut short.
    pub(crate) async fn open(layout: &Layout, runtime: Runtime, under_way: UnderWay) -> Result<Self, Error> {
        let records = Records::new(layout.pools());
        let known: Vec<Record> = records.all()?;
        let pools = Self(Arc::new(Shared {
            runtime,
            under_way,
            records,
            slots: Slots::default(),
            taken: Mutex::default(),
            claims: watch::Sender::new(0),
        }));
        // Before anybody makes a pool, which may have the name of one that is gone.
        if let Err(error) = pools.let_go_of_all_but(&known).await {
            tracing::warn!(error = chain(&error), "what pools kept that are gone stays kept");
        }
        pools.clone().end_orphans(&known);
        for record in known {
            let change = pools.0.slots.make(&record.name)?;
            change.settle(Keeper::start(&pools, record));
        }
        Ok(pools)
    }

    /// Whether there is one that needs its owner.
    pub(crate) fn is_any(&self) -> bool {
        !self.0.slots.is_empty()
    }

    pub(crate) async fn create(&self, record: Record) -> Result<report::Pool, Error> {
        if !(1..=LARGEST).contains(&record.size) {
            return Err(Error::Size(record.size));
        }
        let change = self.0.slots.make(&record.name)?;
        // First, so that the next owner finds whatever VMs there are by then.
        if let Err(error) = self.write_down(&record).await {
            if let Err(error) = self.forget(&record.name).await {
                tracing::warn!(pool = %record.name, error = chain(&error), "a pool is half made");
            }
            return Err(error);
        }
        change.settle(Keeper::start(self, record.clone()));
        Ok(self.report(&record, None))
    }

    async fn write_down(&self, record: &Record) -> Result<(), Error> {
        self.0.runtime.keep(&record.snapshot, &kept_by(&record.name)).await?;
        let (pools, record) = (self.clone(), record.clone());
        let written =
            tokio::task::spawn_blocking(move || pools.0.records.write(record.name.as_str(), &record));
        Ok(written.await.map_err(|_| Error::Ended)??)
    }

    async fn unwrite(&self, name: &PoolName) -> Result<(), Error> {
        let (pools, name) = (self.clone(), name.clone());
        let removed = tokio::task::spawn_blocking(move || pools.0.records.remove(name.as_str()));
        Ok(removed.await.map_err(|_| Error::Ended)??)
    }

    /// The template stays kept as long as there is a record.
    async fn forget(&self, name: &PoolName) -> Result<(), Error> {
        self.unwrite(name).await?;
        Ok(self.0.runtime.let_go(&kept_by(name)).await?)
    }

    pub(crate) fn list(&self) -> Vec<report::Pool> {
        let known = self.0.slots.all(|keeper| (keeper.record.clone(), keeper.why()));
        known.into_iter().map(|(record, failed)| self.report(&record, failed)).collect()
    }

    /// The pool's prepared VMs go with it; those that were claimed go on.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), Error> {
        let (change, keeper) = self.0.slots.remove(&parse(name)?)?;
        let record = keeper.end().await;
        if let Err(error) = self.unwrite(&record.name).await {
            change.settle(Keeper::start(self, record));
            return Err(error);
        }
        // Without a record what is left of it goes when the next owner comes.
        let mut ended = Ok(());
        for vm in self.ready(&record) {
            ended = ended.and(self.end(&vm).await);
        }
        self.0.runtime.let_go(&kept_by(&record.name)).await?;
        ended
    }

    /// Gives exactly one VM to whoever asks. One that does not wake up is ended, and another one tried.
    pub(crate) async fn claim(&self, name: &str, claim: Claim, identity: Identity) -> Result<Claimed, Error> {
        let name = parse(name)?;
        let known = self.0.slots.get(&name, |keeper| keeper.record.clone());
        let record = known.ok_or_else(|| Error::NoSuchPool(name.to_string()))?;
        // While it waited it was to leave nothing behind.
        let when_stopped = Some(claim.when_stopped.unwrap_or(WhenStopped::Keep));
        let claim = Claim { when_stopped, ..claim };
        let _claiming = Claiming::begin(&self.0.claims);
        for _ in 0..MOST_TRIED {
            let Some(vm) = self.take(&record) else { break };
            match self.0.runtime.claim(&vm, claim.clone(), identity.clone()).await {
                Ok(status) => {
                    lock(&self.0.taken).remove(&vm);
                    return Ok(Claimed { vm: status, was_ready: true });
                }
                // No fault of the VM: it waits for somebody else.
                Err(error) if is_refusal(&error) => {
                    lock(&self.0.taken).remove(&vm);
                    return Err(error.into());
                }
                Err(error) => {
                    let text = chain(&error);
                    tracing::warn!(vm = %vm, pool = %record.name, error = text, "a prepared VM did not wake up");
                    self.clear_away(&vm, &error).await;
                    lock(&self.0.taken).remove(&vm);
                }
            }
        }
        let vm = self.0.runtime.restore(&record.snapshot, claimed(&record.name, claim), identity).await?;
        Ok(Claimed { vm, was_ready: false })
    }

    /// Nothing stays of a VM that did not wake up. One that was not prepared any more is whoever's made it so.
    async fn clear_away(&self, vm: &VmId, error: &imp_runtime::Error) {
        if matches!(error, imp_runtime::Error::NotActivated { source: NotActivated::NotPrepared { .. }, .. })
        {
            return;
        }
        if let Err(error) = self.end(vm).await {
            tracing::warn!(vm = %vm, error = chain(&error), "it stays");
        }
    }

    /// Nobody else gets this one.
    fn take(&self, pool: &Record) -> Option<VmId> {
        let mut taken = lock(&self.0.taken);
        let vm = self.prepared(pool).into_iter().find(|vm| !taken.contains(vm))?;
        taken.insert(vm.clone());
        Some(vm)
    }

    fn ready(&self, pool: &Record) -> Vec<VmId> {
        let taken = lock(&self.0.taken);
        self.prepared(pool).into_iter().filter(|vm| !taken.contains(vm)).collect()
    }

    /// Oldest first.
    fn prepared(&self, pool: &Record) -> Vec<VmId> {
        let vms = self.0.runtime.list();
        let vms = vms.iter().filter(|vm| vm.state == State::Prepared && is_of(vm, pool));
        vms.map(|vm| vm.id.clone()).collect()
    }

    fn report(&self, record: &Record, failed: Option<String>) -> report::Pool {
        report::Pool {
            name: record.name.to_string(),
            template: record.template.clone(),
            snapshot: record.snapshot,
            size: record.size,
            ready: u32::try_from(self.ready(record).len()).unwrap_or(u32::MAX),
            failed,
        }
    }

    async fn let_go_of_all_but(&self, known: &[Record]) -> Result<(), Error> {
        let kept_for: HashSet<String> = known.iter().map(|record| kept_by(&record.name)).collect();
        for name in self.0.runtime.keepers().await? {
            if pool_of(&name).is_some() && !kept_for.contains(&name) {
                self.0.runtime.let_go(&name).await?;
            }
        }
        Ok(())
    }

    /// VMs of pools that are gone.
    fn end_orphans(self, known: &[Record]) {
        let vms = self.0.runtime.list();
        let orphans = vms.iter().filter(|vm| {
            vm.state == State::Prepared
                && vm.labels.contains_key(LABEL)
                && !known.iter().any(|record| is_of(vm, record))
        });
        let orphans: Vec<VmId> = orphans.map(|vm| vm.id.clone()).collect();
        tokio::spawn(async move {
            for vm in orphans {
                if let Err(error) = self.end(&vm).await {
                    tracing::warn!(vm = %vm, error = chain(&error), "a VM without a pool stays");
                }
            }
        });
    }

    /// One that is gone already is no error.
    async fn end(&self, vm: &VmId) -> Result<(), Error> {
        let runtime = &self.0.runtime;
        let ended = async {
            runtime.kill(vm).await?;
            runtime.remove(vm).await
        };
        match ended.await {
            Ok(()) | Err(imp_runtime::Error::NoSuchVm { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn child(pool: &PoolName) -> Child {
    let name = format!("{pool}-{:08x}", fastrand::u32(..));
    let name = name.parse().expect("the name of a pool and digits name a VM");
    // Nobody has it, and so nobody would remove it when it ends by itself.
    let when_stopped = WhenStopped::Remove;
    Child {
        labels: BTreeMap::from([(LABEL.to_owned(), pool.to_string())]),
        when_stopped,
        ..Child::named(name)
    }
}

/// What somebody gets for whom none is ready.
fn claimed(pool: &PoolName, claim: Claim) -> Child {
    let Claim { name, labels, ports, when_stopped } = claim;
    let mut child = child(pool);
    child.name = name.unwrap_or(child.name);
    child.labels.extend(labels);
    child.ports = ports;
    child.when_stopped = when_stopped.unwrap_or(WhenStopped::Keep);
    child
}

/// Whether whoever asked asked for what cannot be.
fn is_refusal(error: &imp_runtime::Error) -> bool {
    matches!(error, imp_runtime::Error::NameTaken { .. } | imp_runtime::Error::Port(_))
}

/// Whether it was made for this pool, also if it is somebody's by now.
fn is_of(vm: &VmStatus, pool: &Record) -> bool {
    vm.labels.get(LABEL).is_some_and(|name| name == pool.name.as_str()) && vm.made_of == Some(pool.snapshot)
}

fn parse(name: &str) -> Result<PoolName, Error> {
    name.parse().map_err(|_| Error::NoSuchPool(name.chars().take(100).collect()))
}

fn kept_by(pool: &PoolName) -> String {
    format!("{KEPT_BY}{pool}")
}

/// The pool that keeps a template, by the name that stands in a list of those who use it.
pub(crate) fn pool_of(kept_by: &str) -> Option<&str> {
    kept_by.strip_prefix(KEPT_BY)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
