//! Everything that a VM needs before its VMM starts.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use imp_storage::snapshots::Part;
use tokio::sync::watch;

use super::{Context, Message, Prepared, Vm, chain};
use crate::admission::VMM_THREADS;
use crate::layout::VmLayout;
use crate::ledger::{self, Origin};
use crate::lifecycle::Input;
use crate::network::{self, Network};
use crate::spec::{NetworkMode, VmSpec};
use crate::status::{Failure, PortFacts};
use crate::template::host;
use crate::vmm::{self, snapshot::SnapshotFiles};
use crate::{boot, cgroup, ports, prefetch, restore};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Boot(#[from] boot::Error),
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    #[error(transparent)]
    Ports(#[from] ports::Error),
    #[error(transparent)]
    Passt(#[from] network::passt::Error),
    #[error(transparent)]
    Bridge(#[from] network::bridge::Error),
    #[error("cannot make the scratch disk")]
    Scratch(#[source] imp_storage::disk::Error),
    #[error("the snapshot that the VM is to be made of cannot be used")]
    Snapshot(#[source] Box<imp_storage::snapshots::Error>),
    #[error("the disk of the image, {}, is not there: pull the image again", path.display())]
    Base {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is neither a directory nor a file that can be copied into the guest", path.display())]
    Mount { path: PathBuf },
    #[error("preparing the VM was ended")]
    Ended,
}

impl Vm {
    pub(super) fn prepare(&mut self) {
        self.about_to_start();
        let (context, record, layout) = (Arc::clone(&self.context), self.record.clone(), self.layout.clone());
        let overhead = self.driver.overhead_bytes();
        let guest = self.connection.subscribe();
        let messages = self.messages.clone();
        // Not ended half way: what has been made must be known.
        tokio::spawn(async move {
            let message = match prepare(context, record, layout, overhead, guest).await {
                Ok(prepared) => Message::Prepared(Box::new(prepared)),
                Err(error) => Message::Happened(Input::Failed(Failure::Spawn { detail: chain(&error) })),
            };
            let _ = messages.send(message);
        });
    }
}

async fn prepare(
    context: Arc<Context>,
    record: ledger::Record,
    layout: VmLayout,
    overhead: u64,
    guest: watch::Receiver<Option<imp_protocol::connection::Connection>>,
) -> Result<Prepared, Error> {
    let mut ports = Vec::new();
    for port in &record.spec.ports {
        ports.push(match record.bridge {
            Some(_) => ports::reserve(*port)?,
            None => ports::publish(*port, guest.clone()).await?,
        });
    }
    let blocking =
        tokio::task::spawn_blocking(move || prepare_blocking(&context, record, &layout, overhead, ports));
    blocking.await.map_err(|_| Error::Ended)?
}

fn prepare_blocking(
    context: &Context,
    mut record: ledger::Record,
    layout: &VmLayout,
    overhead: u64,
    ports: Vec<ports::Published>,
) -> Result<Prepared, Error> {
    if let Some(bridge) = &mut record.bridge {
        let facts: Vec<PortFacts> = ports.iter().map(|port| port.facts.clone()).collect();
        bridge.publish = network::bridge::published(&facts);
    }
    // The first record is on the disk; what follows ends with this machine.
    ledger::write_unsynced(layout, &record)?;
    let (spec, id) = (&record.spec, &record.status.id);
    check(spec)?;
    ledger::remove_directory(layout.runtime())?;
    make_private(layout.runtime())?;
    let (origin, kernel, booted) = match &record.origin {
        Origin::Boot => {
            let kernel = boot::kernel(&context.layout, &spec.kernel)?;
            let initramfs = context.initramfs.path(&context.layout, &kernel, &context.agent)?;
            let booted = host::booted(&kernel, &initramfs)?;
            imp_storage::disk::create_scratch(&layout.scratch(), spec.scratch.bytes())
                .map_err(Error::Scratch)?;
            let image = vmm::Image { kernel: kernel.facts.path.clone(), initramfs };
            (vmm::Origin::Boot(image), kernel.facts, Some(booted))
        }
        Origin::Snapshot { digest } => {
            let host = restore::host(&record.status.driver);
            let opened = context.store.snapshots().open(digest, &host);
            let opened = opened.map_err(|error| Error::Snapshot(Box::new(error)))?;
            imp_storage::disk::clone_scratch(&opened.part(Part::Scratch), &layout.scratch())
                .map_err(Error::Scratch)?;
            prefetch::prefetch(&opened.part(Part::Memory));
            let files = SnapshotFiles { state: opened.part(Part::State), memory: opened.part(Part::Memory) };
            (vmm::Origin::Snapshot(files), record.status.kernel.clone(), record.booted)
        }
    };
    let mut groups = cgroup::make(id, &limits(spec, overhead));
    let network = network_of(context, &record, layout)?;
    if let Some(process) = network.as_ref().and_then(Network::process) {
        groups.not_enforced.extend(cgroup::enter(&groups.directories, process.pid()));
    }
    let cgroup::Groups { enforced, not_enforced, .. } = groups;
    Ok(Prepared { origin, kernel, booted, ports, network, limits: enforced, not_enforced })
}

fn check(spec: &VmSpec) -> Result<(), Error> {
    fs::File::open(&spec.base.path).map_err(|source| Error::Base { path: spec.base.path.clone(), source })?;
    match spec.mounts.iter().find(|mount| !mount.source.is_dir() && !mount.source.is_file()) {
        Some(mount) => Err(Error::Mount { path: mount.source.clone() }),
        None => Ok(()),
    }
}

/// Sockets in here give power over the VM.
fn make_private(path: &std::path::Path) -> Result<(), Error> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| Error::Make { path: path.to_owned(), source })
}

fn network_of(
    context: &Context,
    record: &ledger::Record,
    layout: &VmLayout,
) -> Result<Option<Network>, Error> {
    if let Some(bridge) = &record.bridge {
        let namespace = context.bridges.connect(bridge)?;
        context.bridges.await_free_tap(bridge)?;
        let name_server = context.bridges.name_server(bridge)?;
        return Ok(Some(Network::Bridge { namespace, network: Box::new(bridge.clone()), name_server }));
    }
    match record.status.network.mode {
        NetworkMode::None | NetworkMode::Bridge => Ok(None),
        NetworkMode::User => {
            let program = network::passt::program()?;
            Ok(Some(Network::Passt(network::passt::start(&program, &record.status.id, layout)?)))
        }
    }
}

/// The page cache counts, too. Half of the guest's memory again keeps that of its disks from thrashing; what is written of a
/// snapshot goes to the disk meanwhile.
fn limits(spec: &VmSpec, overhead: u64) -> cgroup::Limits {
    let memory = spec.memory.bytes();
    let cpus = u64::from(spec.cpus.get());
    cgroup::Limits {
        memory_bytes: memory + memory / 2 + overhead * 2,
        // Without a limit of its own: its processors, and one more for its devices.
        cpu_millis: spec.limits.cpu_millis.map_or((cpus + 1) * 1000, u64::from),
        threads: cpus + VMM_THREADS * 4,
    }
}
