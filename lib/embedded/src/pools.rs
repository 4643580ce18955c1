//! Warm pools: for each one a task that keeps so many VMs prepared, and the claims that take them.
//!
//! ```text
//! on record ─► filling ─► as many as it is to have ─► a claim takes one ─► filling …
//!                 └► a failure: waits, longer each time
//! ```
//!
//! Which pool a prepared VM is for is a label of it, so that another owner finds its pools as they are.

mod back_off;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use imp_runtime::spec::{Child, Identity};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::{Digest, NotActivated, Runtime, VmId};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

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
/// How long the filling of a pool waits for claims, which want the processors now.
const CLAIMS_FIRST: Duration = Duration::from_secs(1);
/// VMs that a claim tries before it makes one itself.
const MOST_TRIED: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no pool {0:?}; `imp pool ls` lists all")]
    NoSuchPool(String),
    #[error("there is a pool {0} already: choose another name, or remove it with `imp pool rm {0}`")]
    Taken(PoolName),
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
    keepers: Mutex<BTreeMap<PoolName, Keeper>>,
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

/// The task that fills a pool.
struct Keeper {
    record: Record,
    end: CancellationToken,
    failed: Arc<Mutex<Option<String>>>,
    task: JoinHandle<()>,
}

impl Pools {
    /// Those on record go on.
    pub(crate) fn open(layout: &Layout, runtime: Runtime, under_way: UnderWay) -> Result<Self, Error> {
        let records = Records::new(layout.pools());
        let known: Vec<Record> = records.all()?;
        let pools = Self(Arc::new(Shared {
            runtime,
            under_way,
            records,
            keepers: Mutex::default(),
            taken: Mutex::default(),
            claims: watch::Sender::new(0),
        }));
        pools.clone().end_orphans(&known);
        for record in known {
            pools.begin(record)?;
        }
        Ok(pools)
    }

    /// Whether there is one that needs its owner.
    pub(crate) fn is_any(&self) -> bool {
        !self.keepers().is_empty()
    }

    pub(crate) async fn create(&self, record: Record) -> Result<report::Pool, Error> {
        if !(1..=LARGEST).contains(&record.size) {
            return Err(Error::Size(record.size));
        }
        self.begin(record.clone())?;
        if let Err(error) = self.write_down(&record).await {
            // Nothing that the next owner would not know of.
            if let Err(error) = self.remove(record.name.as_str()).await {
                tracing::warn!(pool = %record.name, error = crate::server::chain(&error), "a pool is half removed");
            }
            return Err(error);
        }
        Ok(self.report(&record, None))
    }

    async fn write_down(&self, record: &Record) -> Result<(), Error> {
        self.0.runtime.keep(&record.snapshot, &kept_by(&record.name)).await?;
        let (pools, record) = (self.clone(), record.clone());
        let written =
            tokio::task::spawn_blocking(move || pools.0.records.write(record.name.as_str(), &record));
        Ok(written.await.map_err(|_| Error::Ended)??)
    }

    pub(crate) fn list(&self) -> Vec<report::Pool> {
        let known: Vec<(Record, Option<String>)> = self
            .keepers()
            .values()
            .map(|keeper| (keeper.record.clone(), lock(&keeper.failed).clone()))
            .collect();
        known.into_iter().map(|(record, failed)| self.report(&record, failed)).collect()
    }

    /// The pool's prepared VMs go with it; those that were claimed go on.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), Error> {
        let found = name.parse().ok().and_then(|name: PoolName| self.keepers().remove(&name));
        let Some(Keeper { record, end, task, .. }) = found else {
            return Err(Error::NoSuchPool(name.chars().take(100).collect()));
        };
        // Without a record what is left of it goes when the next owner comes.
        let (pools, name) = (self.clone(), record.name.clone());
        let removed = tokio::task::spawn_blocking(move || pools.0.records.remove(name.as_str()));
        removed.await.map_err(|_| Error::Ended)??;
        end.cancel();
        // An error says that it ended by a bug of ours, and so it has ended.
        let _ = task.await;
        for vm in self.ready(&record.name) {
            self.end(&vm).await?;
        }
        Ok(self.0.runtime.let_go(&kept_by(&record.name)).await?)
    }

    /// Gives exactly one VM to whoever asks. One that does not wake up is ended, and another one tried.
    pub(crate) async fn claim(&self, name: &str, identity: Identity) -> Result<Claimed, Error> {
        let known = name
            .parse()
            .ok()
            .and_then(|name: PoolName| self.keepers().get(&name).map(|keeper| keeper.record.clone()));
        let record = known.ok_or_else(|| Error::NoSuchPool(name.chars().take(100).collect()))?;
        let _claiming = Claiming::begin(&self.0.claims);
        for _ in 0..MOST_TRIED {
            let Some(vm) = self.take(&record.name) else { break };
            let activated = self.0.runtime.activate(&vm, identity.clone()).await;
            match activated {
                Ok(status) => {
                    lock(&self.0.taken).remove(&vm);
                    return Ok(Claimed { vm: status, was_ready: true });
                }
                Err(error) => {
                    let text = crate::server::chain(&error);
                    tracing::warn!(vm = %vm, pool = %record.name, error = text, "a prepared VM did not wake up");
                    self.clear_away(&vm, &error).await;
                    lock(&self.0.taken).remove(&vm);
                }
            }
        }
        let vm = self.0.runtime.restore(&record.snapshot, child(&record.name), identity).await?;
        Ok(Claimed { vm, was_ready: false })
    }

    /// Nothing stays of a VM that did not wake up. One that was not prepared any more is whoever's made it so.
    async fn clear_away(&self, vm: &VmId, error: &imp_runtime::Error) {
        if matches!(error, imp_runtime::Error::NotActivated { source: NotActivated::NotPrepared { .. }, .. })
        {
            return;
        }
        if let Err(error) = self.end(vm).await {
            tracing::warn!(vm = %vm, error = crate::server::chain(&error), "it stays");
        }
    }

    /// Nobody else gets this one.
    fn take(&self, pool: &PoolName) -> Option<VmId> {
        let mut taken = lock(&self.0.taken);
        let vm = self.prepared(pool).into_iter().find(|vm| !taken.contains(vm))?;
        taken.insert(vm.clone());
        Some(vm)
    }

    fn ready(&self, pool: &PoolName) -> Vec<VmId> {
        let taken = lock(&self.0.taken);
        self.prepared(pool).into_iter().filter(|vm| !taken.contains(vm)).collect()
    }

    /// Oldest first.
    fn prepared(&self, pool: &PoolName) -> Vec<VmId> {
        let vms = self.0.runtime.list();
        let of_pool = |vm: &&Arc<VmStatus>| {
            vm.state == State::Prepared && vm.labels.get(LABEL).is_some_and(|name| name == pool.as_str())
        };
        vms.iter().filter(of_pool).map(|vm| vm.id.clone()).collect()
    }

    fn report(&self, record: &Record, failed: Option<String>) -> report::Pool {
        report::Pool {
            name: record.name.to_string(),
            template: record.template.clone(),
            snapshot: record.snapshot,
            size: record.size,
            ready: u32::try_from(self.ready(&record.name).len()).unwrap_or(u32::MAX),
            failed,
        }
    }

    /// Nobody else begins one of this name.
    fn begin(&self, record: Record) -> Result<(), Error> {
        let mut keepers = self.keepers();
        if keepers.contains_key(&record.name) {
            return Err(Error::Taken(record.name));
        }
        let (end, failed) = (CancellationToken::new(), Arc::new(Mutex::new(None)));
        let task = tokio::spawn(fill(self.clone(), record.clone(), end.clone(), Arc::clone(&failed)));
        keepers.insert(record.name.clone(), Keeper { record, end, failed, task });
        Ok(())
    }

    /// VMs of pools whose removal was cut short.
    fn end_orphans(self, known: &[Record]) {
        let is_known = |pool: &str| known.iter().any(|record| record.name.as_str() == pool);
        let vms = self.0.runtime.list();
        let orphans = vms.iter().filter(|vm| {
            vm.state == State::Prepared && vm.labels.get(LABEL).is_some_and(|pool| !is_known(pool))
        });
        let orphans: Vec<VmId> = orphans.map(|vm| vm.id.clone()).collect();
        tokio::spawn(async move {
            for vm in orphans {
                if let Err(error) = self.end(&vm).await {
                    tracing::warn!(vm = %vm, error = crate::server::chain(&error), "a VM without a pool stays");
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

    fn keepers(&self) -> MutexGuard<'_, BTreeMap<PoolName, Keeper>> {
        lock(&self.0.keepers)
    }
}

/// Prepares VMs while there are too few, one at a time, until it is told to end or its owner ends.
async fn fill(pools: Pools, record: Record, end: CancellationToken, failed: Arc<Mutex<Option<String>>>) {
    let mut failures = 0;
    // Before the first look, so that no change is missed.
    let mut changes = pools.0.runtime.subscribe();
    while !end.is_cancelled() {
        if pools.ready(&record.name).len() >= record.size as usize {
            tokio::select! {
                () = end.cancelled() => return,
                // An error: changes were missed.
                _ = changes.recv() => continue,
            }
        }
        let mut claims = pools.0.claims.subscribe();
        let _ = tokio::time::timeout(CLAIMS_FIRST, claims.wait_for(|claims| *claims == 0)).await;
        // Not left half way, by nobody.
        let Ok(step) = pools.0.under_way.begin() else { return };
        let prepared = pools.0.runtime.prepare(&record.snapshot, child(&record.name)).await;
        drop(step);
        match prepared {
            Ok(vm) => {
                tracing::info!(%vm, pool = %record.name, "prepared");
                failures = 0;
                *lock(&failed) = None;
            }
            Err(error) => {
                failures += 1;
                let error = crate::server::chain(&error);
                tracing::warn!(pool = %record.name, failures, error, "no VM was prepared");
                *lock(&failed) = Some(error);
                tokio::select! {
                    () = end.cancelled() => return,
                    () = tokio::time::sleep(back_off::pause(failures, fastrand::u8(..))) => {}
                }
            }
        }
    }
}

fn child(pool: &PoolName) -> Child {
    let name = format!("{pool}-{:08x}", fastrand::u32(..));
    let name = name.parse().expect("the name of a pool and digits name a VM");
    Child { labels: BTreeMap::from([(LABEL.to_owned(), pool.to_string())]), ..Child::named(name) }
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
