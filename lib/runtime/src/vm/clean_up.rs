//! Takes away all that a VM has on the host but its record and its logs.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Context, Message, Vm, spawn};
use crate::id::VmId;
use crate::layout::VmLayout;
use crate::ledger::{self, Origin, Stage};
use crate::lifecycle::{Input, Phase};
use crate::network::{bridge, passt};
use crate::process::{self, Process};
use crate::restore::{self, CameTo};
use crate::status::{Outcome, VmmEnd};
use crate::vmm::Driver;
use crate::vmm::firecracker::jail;
use crate::{cgroup, console, pins};

/// A killed process that is not gone by then sits in the kernel.
const GONE: Duration = Duration::from_secs(10);
/// A group refuses to go for a moment after its last process.
const GROUP_GONE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);
/// Lines of the console that go with a failure: a kernel's panic, whose reason stands above its trace, is this long.
const LAST_LINES: usize = 60;

impl Vm {
    pub(super) fn clean_up(&mut self) {
        self.step = None;
        self.loss_watch = None;
        self.exit_watch = None;
        self.prepared = None;
        self.connection.send_replace(None);
        self.channel = None;
        self.log = None;
        self.ports.clear();
        self.name_server = None;
        if let Phase::CleaningUp { outcome: Outcome::Failed { console, .. } } = &mut self.phase {
            *console = last_words(&self.layout);
        }
        self.machine = None;
        let remains = Remains {
            id: self.id.clone(),
            vmm: self.vmm.take(),
            network: self.network.take(),
            user: self.record.status.vmm_user,
            starting: match &self.record.stage {
                Stage::Starting { vmm_program } => Some(vmm_program.clone()),
                Stage::Created
                | Stage::Booting { .. }
                | Stage::Running { .. }
                | Stage::Dormant { .. }
                | Stage::Waking { .. }
                | Stage::Asleep { .. }
                | Stage::Paused { .. }
                | Stage::Ended { .. }
                | Stage::Stopped => None,
            },
            bridge: self.record.bridge.is_some(),
            origin: self.record.origin.clone(),
            came_to: CameTo::of(&self.record),
            cgroups: self.record.cgroups.clone(),
            layout: self.layout.clone(),
            driver: Arc::clone(&self.driver),
        };
        let (context, messages) = (Arc::clone(&self.context), self.messages.clone());
        // Not ended half way.
        tokio::spawn(async move {
            remains.remove(&context).await;
            let _ = messages.send(Message::Happened(Input::CleanedUp));
        });
    }

    /// Watches a VMM that was killed without having been attached to.
    pub(super) fn watch_unattached(&mut self) {
        let (vmm, messages) = (self.vmm.clone(), self.messages.clone());
        self.exit_watch = Some(spawn(async move {
            let end = match vmm {
                Some(vmm) => vmm.ended().await,
                None => VmmEnd::Unknown,
            };
            let _ = messages.send(Message::Happened(Input::VmmEnded(end)));
        }));
    }
}

/// The end of what the guest and its VMM said.
fn last_words(layout: &VmLayout) -> Vec<String> {
    let mut lines = console::last_lines(&layout.console(), &layout.earlier_console(), LAST_LINES);
    lines.extend(console::last_lines(&layout.vmm_log(), &layout.earlier_vmm_log(), LAST_LINES));
    lines
}

/// What may be left of a VM.
pub(crate) struct Remains {
    pub id: VmId,
    pub vmm: Option<Process>,
    pub network: Option<Process>,
    /// Whom nothing but this VM runs as.
    pub user: Option<u32>,
    /// The VMM's program, if processes may run that nobody has written down.
    pub starting: Option<PathBuf>,
    /// Whether the VM was to have a bridge network.
    pub bridge: bool,
    pub origin: Origin,
    pub came_to: CameTo,
    pub cgroups: Vec<PathBuf>,
    pub layout: VmLayout,
    pub driver: Arc<dyn Driver>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("a control group could not be removed")]
    Groups(#[source] io::Error),
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    #[error("{} could not be removed", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Pins(#[from] pins::Error),
    #[error(transparent)]
    Bridge(bridge::Error),
    #[error("a snapshot that nothing is made of any more could not be removed")]
    Snapshot(#[source] Box<imp_storage::snapshots::Error>),
}

impl Remains {
    /// Takes away one after the other; what cannot be taken away does not keep the rest.
    pub(crate) async fn remove(self, context: &Arc<Context>) {
        let mut processes: Vec<Process> = self.vmm.into_iter().chain(self.network).collect();
        if let Some(program) = &self.starting {
            processes.extend(self.driver.strays(program, self.id.as_str()));
            if let Ok(program) = passt::program() {
                processes.extend(passt::find(&program, &self.id));
            }
        }
        for process in &processes {
            process.kill();
        }
        for process in &processes {
            if timeout(GONE, process.ended()).await.is_err() {
                tracing::error!(vm = %self.id, pid = process.pid(), "a killed process does not end");
            }
        }
        if let Some(program) = &self.starting {
            // One that was about to start another when it was killed.
            let strays = self.driver.strays(program, self.id.as_str());
            for process in strays.into_iter().chain(self.user.into_iter().flat_map(process::of_user)) {
                process.kill();
                process.ended().await;
            }
        }
        let groups = remove_groups(self.cgroups).await;
        let (context, layout, id) = (Arc::clone(context), self.layout, self.id.clone());
        let (bridge, origin, came_to) = (self.bridge, self.origin, self.came_to);
        let files = tokio::task::spawn_blocking(move || {
            let mut errors = remove_files(&context, &layout, &id);
            if let Origin::Snapshot { digest } = origin {
                let removed = restore::remove_unused(&context.store, &digest, came_to);
                errors.extend(removed.map_err(Error::Snapshot).err());
            }
            // Its VMM has ended: a tap that is held lives on.
            errors.extend(
                bridge.then(|| context.bridges.disconnect(&id).map_err(Error::Bridge).err()).flatten(),
            );
            errors
        });
        let files = files.await;
        for error in groups.err().into_iter().chain(files.unwrap_or_default()) {
            tracing::error!(vm = %self.id, error = &error as &dyn std::error::Error, "something of a VM is left");
        }
    }
}

async fn remove_groups(directories: Vec<PathBuf>) -> Result<(), Error> {
    let deadline = Instant::now() + GROUP_GONE;
    loop {
        match cgroup::remove(&directories) {
            Ok(()) => return Ok(()),
            Err(_) if Instant::now() < deadline => sleep(AGAIN).await,
            Err(error) => return Err(Error::Groups(error)),
        }
    }
}

fn remove_files(context: &Context, layout: &VmLayout, id: &VmId) -> Vec<Error> {
    let scratch = match std::fs::remove_file(layout.scratch()) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(Error::File { path: layout.scratch(), source })
        }
        _ => Ok(()),
    };
    let jail = jail::remove(&layout.jail()).map_err(|source| Error::File { path: layout.jail(), source });
    let results = [
        jail,
        ledger::remove_directory(layout.runtime()).map_err(Error::Ledger),
        scratch,
        context.keeper.unpin(&context.store, id).map_err(Error::Pins),
    ];
    results.into_iter().filter_map(Result::err).collect()
}
