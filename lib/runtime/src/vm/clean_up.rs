//! Takes away all that a VM has on the host but its record and its logs.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Context, Message, Vm, spawn};
use crate::id::VmId;
use crate::layout::VmLayout;
use crate::ledger::{self, Stage};
use crate::lifecycle::{Input, Phase};
use crate::process::{self, Process};
use crate::status::{Outcome, VmmEnd};
use crate::{cgroup, console, network, pins};

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
        self.heartbeat = None;
        self.exit_watch = None;
        self.prepared = None;
        self.connection.send_replace(None);
        self.channel = None;
        self.log = None;
        self.ports.clear();
        if let Phase::CleaningUp { outcome: Outcome::Failed { console, .. } } = &mut self.phase {
            *console = last_words(&self.layout);
        }
        self.machine = None;
        let remains = Remains {
            id: self.id.clone(),
            vmm: self.vmm.take(),
            network: self.network.take(),
            starting: match &self.record.stage {
                Stage::Starting { vmm_program } => Some(vmm_program.clone()),
                Stage::Created | Stage::Booting { .. } | Stage::Running { .. } | Stage::Stopped => None,
            },
            cgroups: self.record.cgroups.clone(),
            layout: self.layout.clone(),
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
    lines.extend(console::last_lines(
        &layout.vmm_log(),
        &layout.vmm_log().with_extension("none"),
        LAST_LINES,
    ));
    lines
}

/// What may be left of a VM.
pub(crate) struct Remains {
    pub id: VmId,
    pub vmm: Option<Process>,
    pub network: Option<Process>,
    /// The VMM's program, if processes may run that nobody has written down.
    pub starting: Option<PathBuf>,
    pub cgroups: Vec<PathBuf>,
    pub layout: VmLayout,
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
}

impl Remains {
    /// Takes away one after the other; what cannot be taken away does not keep the rest.
    pub(crate) async fn remove(self, context: &Arc<Context>) {
        let mut processes: Vec<Process> = self.vmm.into_iter().chain(self.network).collect();
        if let Some(program) = &self.starting {
            let mark = context.driver.mark(self.id.as_str());
            processes.extend(process::find(program.as_os_str(), mark.as_ref()));
            if let Ok(program) = network::program() {
                processes.extend(network::find(&program, &self.id));
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
        let groups = remove_groups(self.cgroups).await;
        let (context, layout, id) = (Arc::clone(context), self.layout, self.id.clone());
        let files = tokio::task::spawn_blocking(move || remove_files(&context, &layout, &id)).await;
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
    let results = [
        ledger::remove_directory(layout.runtime()).map_err(Error::Ledger),
        scratch,
        pins::unpin(&context.store, id).map_err(Error::Pins),
    ];
    results.into_iter().filter_map(Result::err).collect()
}
