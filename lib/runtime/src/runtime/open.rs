//! How an owner begins: takes the data directory, finds out what the host can do, and takes over what is there.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use imp_network::spec::VmNetwork;
use rustix::fs::FlockOperation;
use tokio::sync::{Semaphore, broadcast};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Config, Error, Runtime, Shared, Vms};
use crate::boot::{self, InitramfsCache};
use crate::id::VmId;
use crate::layout::Layout;
use crate::ledger::{self, Found, Origin, Purpose, Record, Stage};
use crate::lifecycle::{Phase, Remains, VmmRemains};
use crate::network::bridge::Bridges;
use crate::pins::Keeper;
use crate::process::{Process, ProcessRecord};
use crate::restore::{self, Away, CameTo};
use crate::spec::WhenStopped;
use crate::status::Outcome;
use crate::vm::{self, Beginning, Context};
use crate::vmm::drivers::Drivers;
use crate::vmm::firecracker::jail;

/// How long an owner that is on its way out may still hold the data directory.
const HAND_OVER: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(20);
/// What is left of suspended VMs gets to go before others can ask for them.
const GONE: Duration = Duration::from_secs(20);
/// Machines that come to life at the same time.
const FOR_EACH_PROCESSOR: usize = 4;
/// Events that a slow listener may be behind before it loses some.
const EVENTS: usize = 1024;

pub(super) async fn open(config: Config) -> Result<Runtime, Error> {
    let layout = Layout::new(config.data.clone(), config.runtime.clone());
    make_private(layout.data())?;
    make_private(&layout.runtime_vms())?;
    let lock = take(&layout).await?;
    let drivers = Drivers::find(config.driver, &config.programs(), &layout).await?;
    let images = layout.images();
    let store = tokio::task::spawn_blocking(move || {
        imp_storage::store::Store::open(images, imp_storage::store::StoreOptions::default())
    });
    let store = store.await.map_err(|_| Error::Ended)?.map_err(|error| Error::Store(Box::new(error)))?;
    let (events, _) = broadcast::channel(EVENTS);
    let keeper = Keeper::of(&layout)?;
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let bridges = Bridges::new(layout.clone(), config.bridge.clone());
    let context = Arc::new(Context {
        layout,
        drivers,
        agent: config.guest_agent.clone(),
        initramfs: InitramfsCache::default(),
        store,
        events,
        ended: CancellationToken::new(),
        bridges,
        coming_to_life: Arc::new(Semaphore::new(FOR_EACH_PROCESSOR * processors)),
        keeper,
        _lock: lock,
    });
    boot::prune(&context.layout);
    let vms = take_over(&context).await?;
    Ok(Runtime {
        shared: Arc::new(Shared { context, config, vms: Mutex::new(vms), builds: Mutex::default() }),
    })
}

fn make_private(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| Error::Open { path: path.to_owned(), source })
}

async fn take(layout: &Layout) -> Result<File, Error> {
    let path = layout.lock();
    let opened = File::options().create(true).truncate(false).write(true).open(&path);
    let lock = opened.map_err(|source| Error::Open { path: path.clone(), source })?;
    let deadline = Instant::now() + HAND_OVER;
    loop {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(AGAIN).await,
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::Owned { path: layout.data().to_owned() });
            }
            Err(source) => return Err(Error::Open { path, source: io::Error::from(source) }),
        }
    }
}

/// Every VM of the ledger gets its task again; what has no record goes.
async fn take_over(context: &Arc<Context>) -> Result<Vms, Error> {
    let Found { records, leftovers, unreadable } = ledger::look(&context.layout)?;
    for id in leftovers {
        let vm = context.layout.vm(&id);
        jail::remove(&vm.jail()).map_err(|source| Error::Open { path: vm.jail(), source })?;
        ledger::remove(&vm)?;
    }
    for (id, error) in &unreadable {
        tracing::error!(vm = %id, error = error as &dyn std::error::Error, "a VM is left alone");
    }
    let mut beginnings = Vec::new();
    for record in records {
        let beginning = beginning(&record)?;
        beginnings.push((record, beginning));
    }
    let used =
        beginnings.iter().filter(|(record, _)| record.stage != Stage::Stopped).map(|(r, _)| &r.status.id);
    // What is left alone may still run from its disk.
    let used: Vec<&VmId> = used.chain(unreadable.iter().map(|(id, _)| id)).collect();
    if let Err(error) = context.keeper.unpin_all_but(&context.store, &used) {
        tracing::warn!(%error, "disks stay pinned");
    }
    let living = beginnings.iter().filter(|(record, beginning)| goes_on(record, beginning));
    let living: Vec<&VmId> = living.map(|(record, _)| &record.status.id).collect();
    let away = restore::remove_orphans(&context.store, &living);
    let away = away.unwrap_or_else(|error| {
        tracing::warn!(error = vm::chain(&error), "snapshots that nobody needs stay");
        Vec::new()
    });
    take_over_networks(context, &beginnings).await;
    let mut vms = Vms::default();
    let mut in_the_way = Vec::new();
    for (mut record, beginning) in beginnings {
        let id = record.status.id.clone();
        tracing::info!(vm = %id, stage = ?record.stage, "taken over");
        let is_in_the_way = is_in_the_way(&record, &beginning, &away);
        if is_in_the_way {
            record.spec.when_stopped = WhenStopped::Remove;
        }
        let handle = vm::run(Arc::clone(context), record, beginning);
        in_the_way.extend(is_in_the_way.then(|| handle.messages.clone()));
        vms.handles.insert(id, handle);
    }
    // Whoever resumes a suspended VM next finds it whole, and its name free.
    let gone = join_all(in_the_way.iter().map(|messages| messages.closed()));
    if timeout(GONE, gone).await.is_err() {
        tracing::error!("what is left of a suspended VM does not go");
    }
    Ok(vms)
}

/// Whether it is what a suspended VM was before, or was to become when its owner ended.
fn is_in_the_way(record: &Record, beginning: &Beginning, away: &[Away]) -> bool {
    let half_woken = |one: &Away| {
        record.origin == Origin::Snapshot { digest: one.snapshot } && CameTo::of(record) == CameTo::Nothing
    };
    let put_away = |one: &Away| one.vm == record.status.id && !goes_on(record, beginning);
    away.iter().any(|one| put_away(one) || half_woken(one))
}

/// Whether it has not come to its end. A VMM that was killed may live on for a moment.
fn goes_on(record: &Record, beginning: &Beginning) -> bool {
    beginning.lives() && !matches!(record.stage, Stage::Ended { .. })
}

/// Those of VMs whose VMM lives are made whole, all others go. A failure leaves them as the kernel has them.
async fn take_over_networks(context: &Arc<Context>, beginnings: &[(Record, Beginning)]) {
    let living: Vec<VmNetwork> = beginnings
        .iter()
        .filter(|(_, beginning)| beginning.lives())
        .filter_map(|(record, _)| record.bridge.clone())
        .collect();
    let taker = Arc::clone(context);
    let taken = tokio::task::spawn_blocking(move || taker.bridges.take_over(living)).await;
    if let Ok(Err(error)) = taken {
        let error = vm::chain(&error);
        tracing::error!(error, "the bridge networks of VMs are not taken over");
    }
}

fn beginning(record: &Record) -> Result<Beginning, Error> {
    let adopt = |process: &ProcessRecord| Process::adopt(process);
    let network = match &record.network {
        Some(process) => adopt(process)?,
        None => None,
    };
    let vmm = match &record.stage {
        Stage::Created => return Ok(Beginning::Abandoned),
        Stage::Stopped => {
            let outcome = record.status.outcome.clone().unwrap_or(Outcome::Killed);
            return Ok(Beginning::Stopped(outcome));
        }
        // A VMM may run that is not written down; cleaning up looks for it.
        Stage::Starting { .. } => None,
        Stage::Booting { vmm }
        | Stage::Running { vmm }
        | Stage::Dormant { vmm }
        | Stage::Waking { vmm }
        | Stage::Asleep { vmm }
        | Stage::Paused { vmm }
        | Stage::Ended { vmm, .. } => adopt(vmm)?,
    };
    let (phase, commands) = Phase::adopted(remains(record, vmm.is_some()));
    Ok(Beginning::Adopted { phase, commands, vmm, network })
}

/// What is left of a VM of which this is on record.
fn remains(record: &Record, vmm_lives: bool) -> Remains {
    let vmm = if vmm_lives { VmmRemains::Alive } else { VmmRemains::Gone };
    match (&record.stage, &record.origin, record.purpose) {
        (Stage::Ended { outcome, .. }, ..) => Remains::Ended { vmm, outcome: outcome.clone() },
        // Whoever made the template, or the VM for itself, is gone.
        (_, _, Purpose::Template) => Remains::Useless { vmm },
        (Stage::Booting { .. }, Origin::Snapshot { .. }, _) | (Stage::Waking { .. }, ..) => {
            Remains::Useless { vmm }
        }
        (Stage::Dormant { .. }, _, Purpose::Call) => Remains::Useless { vmm },
        (Stage::Dormant { .. }, _, Purpose::Serve) => Remains::Dormant { vmm },
        (Stage::Running { .. }, ..) => Remains::Started { vmm },
        (Stage::Asleep { .. }, ..) => Remains::Asleep { vmm },
        (Stage::Paused { .. }, ..) => Remains::Paused { vmm },
        (Stage::Created | Stage::Starting { .. } | Stage::Booting { .. } | Stage::Stopped, ..) => {
            Remains::Unfinished { vmm }
        }
    }
}
