//! Makes a template: boots a machine, has it become ready, writes it down, and ends it.
//!
//! ```text
//! digest ─► there already: nothing is done
//!        └► room? ─► boot ─► init commands ─► main process ─► ready? ─► asleep, written down, ended ─► hashed, named
//! ```
//!
//! Whatever fails leaves nothing: the machine is removed when it ends, and what was written goes with its draft.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;
use imp_storage::snapshots::{self, Draft, Keeping};
use tokio::time::timeout;

use super::failed::{Failed, keep_console, kept};
use super::{Readiness, TemplateSpec, digest, host, ready};
use crate::id::VmId;
use crate::ledger::Purpose;
use crate::lifecycle::After;
use crate::restore;
use crate::runtime::{self, New, Runtime};
use crate::spec::{Balloon, BridgeWishes, VmName, VmSpec, WhenStopped};
use crate::status::{Outcome, State};
use crate::vm::Saved;
use crate::vmm::drivers::User;
use crate::vmm::snapshot::SnapshotKind;
use crate::{boot, network, random};

/// Room that a snapshot takes beside memory and disk: the state of devices and processors.
const STATE: u64 = 1 << 20;
/// What a machine that was told to end may take for that.
const END: Duration = Duration::from_secs(60);
/// Label of the machine that becomes a template: the digest of what it is made of.
const LABEL: &str = "imp.template";

/// What is being done for a template, told as it begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildStep {
    /// The machine boots, and the init commands run.
    Boot,
    /// The main process runs; this is waited for.
    Ready(Readiness),
    /// Memory, state and disk are written.
    Snapshot,
    /// All of it is hashed.
    Keep,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the machine of the template did not come up: {0}")]
    Boot(Box<Failed>),
    #[error("the guest was not ready within {} ms: {last}{}", .readiness.at_most.as_millis(), kept(.console))]
    NotReady { readiness: Box<Readiness>, last: String, console: Option<PathBuf> },
    #[error("the machine of the template ended before it was ready: {0}")]
    Ended(Box<Failed>),
    #[error("the machine of the template, VM {id}, does not end: see what keeps it, and `imp rm -f` it")]
    DoesNotEnd { id: VmId },
    #[error("the ingredients of the template do not serialise")]
    Ingredients(#[from] serde_json::Error),
    #[error(transparent)]
    Kernel(#[from] boot::Error),
    #[error(transparent)]
    Snapshots(#[from] Box<snapshots::Error>),
    #[error(transparent)]
    Runtime(#[from] Box<runtime::Error>),
}

impl From<runtime::Error> for Error {
    fn from(error: runtime::Error) -> Self {
        Self::Runtime(Box::new(error))
    }
}

impl Runtime {
    /// The snapshot of a template: the one that is there, or a new one. Whoever asks for the same while it is made waits for it.
    /// A failure leaves nothing, and says at which step it was.
    pub async fn template_build(
        &self,
        spec: TemplateSpec,
        told: impl Fn(BuildStep) + Send + Sync + 'static,
    ) -> Result<Digest, Error> {
        let runtime = self.clone();
        // Not called off half way with its caller: others may wait for it.
        tokio::spawn(async move { runtime.build_whole(spec, told).await })
            .await
            .map_err(|_| runtime::Error::Ended)?
    }

    async fn build_whole(
        &self,
        spec: TemplateSpec,
        told: impl Fn(BuildStep) + Send + Sync,
    ) -> Result<Digest, Error> {
        let context = Arc::clone(self.context());
        let asked = spec.clone();
        let known = tokio::task::spawn_blocking(move || {
            let (wishes, user) = (BridgeWishes::default(), User::of_this_process());
            let network = network::asked(asked.network, &wishes);
            let driver = context.drivers.for_new(network, &asked.limits, Balloon::Without, user);
            let facts = driver.facts();
            if !driver.capabilities().snapshots.contains(&SnapshotKind::Full) {
                return Err(runtime::Error::NoSnapshots { driver: facts.name.clone() }.into());
            }
            let mode = network::choose(asked.network, &wishes, &facts.name, driver.networks(), user);
            let mode = mode.map_err(runtime::Error::NetworkRefused)?;
            let here = restore::host(facts);
            let facts = host::facts(&context, facts, &asked.kernel, mode)?;
            Ok::<_, Error>((digest(&asked, &facts)?, here))
        });
        let (template, here) = known.await.map_err(|_| runtime::Error::Ended)??;
        let only = self.only_build(template);
        let _only = only.lock().await;
        let context = Arc::clone(self.context());
        let bytes = spec.memory.bytes() + spec.scratch.bytes() + STATE;
        let found = tokio::task::spawn_blocking(move || {
            let snapshots = context.store.snapshots();
            let found = snapshots.find(&template)?;
            // One that is damaged, or was lost, is made again beside it.
            let good = found.filter(|digest| snapshots.open(digest, &here).is_ok());
            Ok::<_, snapshots::Error>(match good {
                Some(digest) => Found::There(digest),
                None => Found::Room(snapshots.draft(bytes)?),
            })
        });
        match found
            .await
            .map_err(|_| runtime::Error::Ended)?
            .map_err(|error| Error::Snapshots(Box::new(error)))?
        {
            Found::There(digest) => Ok(digest),
            Found::Room(draft) => self.build_in(draft, template, spec, told).await,
        }
    }

    async fn build_in(
        &self,
        draft: Draft,
        template: Digest,
        spec: TemplateSpec,
        told: impl Fn(BuildStep) + Send + Sync,
    ) -> Result<Digest, Error> {
        told(BuildStep::Boot);
        let id = self.create_new(machine(&spec, &template)).await?;
        self.start(&id).await?;
        let written = self.write_down(&id, &draft, &spec, &told).await;
        if written.is_err() {
            // It may have ended and gone by itself.
            let _ = self.kill(&id).await;
        }
        let saved = written?;
        told(BuildStep::Keep);
        // Its files are closed then.
        self.ended(&id).await?;
        let context = Arc::clone(self.context());
        let kept = tokio::task::spawn_blocking(move || {
            let description = restore::description(&saved.record, Kind::Template, Some(template))
                .map_err(runtime::Error::NotDescribed)?;
            let snapshots = context.store.snapshots();
            let snapshot = snapshots.commit(draft, description, Keeping::Durable).map_err(Box::new)?;
            snapshots.name(&template, &snapshot.digest).map_err(Box::new)?;
            Ok(snapshot.digest)
        });
        kept.await.map_err(|_| runtime::Error::Ended)?
    }

    /// Waits until the machine is ready, and writes it down.
    async fn write_down(
        &self,
        id: &VmId,
        draft: &Draft,
        spec: &TemplateSpec,
        told: &(impl Fn(BuildStep) + Sync),
    ) -> Result<Saved, Error> {
        let mut status = self.watch(id)?;
        let up = status.wait_for(|vm| matches!(vm.state, State::Running | State::Stopped)).await;
        let outcome = up.map_err(|_| runtime::Error::Ended)?.outcome.clone();
        if let Some(outcome) = outcome {
            return Err(Error::Boot(Box::new(Failed::new(self, outcome, &spec.init).await)));
        }
        for readiness in &spec.ready {
            told(BuildStep::Ready(readiness.clone()));
            let ended = async {
                match status.wait_for(|vm| vm.outcome.is_some()).await {
                    Ok(vm) => vm.outcome.clone().unwrap_or(Outcome::Killed),
                    Err(_) => Outcome::Killed,
                }
            };
            tokio::select! {
                biased;
                seen = ready::wait(self, id, readiness, &spec.main) => {
                    let readiness = Box::new(readiness.clone());
                    if let Err(last) = seen {
                        let console = keep_console(self, self.console(id).await.unwrap_or_default()).await;
                        return Err(Error::NotReady { readiness, last: last.0, console });
                    }
                }
                outcome = ended => {
                    return Err(Error::Ended(Box::new(Failed::new(self, outcome, &spec.init).await)));
                }
            }
        }
        told(BuildStep::Snapshot);
        Ok(self.save(id, draft, After::End).await?)
    }

    /// Waits until a machine has ended that was told to; it may have removed itself.
    async fn ended(&self, id: &VmId) -> Result<(), Error> {
        let Ok(mut status) = self.watch(id) else { return Ok(()) };
        let ended = timeout(END, status.wait_for(|vm| vm.state == State::Stopped)).await;
        ended.map(drop).map_err(|_| Error::DoesNotEnd { id: id.clone() })
    }
}

/// Whether it is there already.
enum Found {
    There(Digest),
    Room(Draft),
}

/// The machine that becomes the template.
fn machine(spec: &TemplateSpec, template: &Digest) -> New {
    let TemplateSpec { base, cpus, memory, scratch, network, kernel, hostname, main, limits, init, ready: _ } =
        spec.clone();
    let label = (LABEL.to_owned(), template.to_string());
    let spec = VmSpec {
        name: name(template),
        base,
        cpus,
        memory,
        scratch,
        main,
        hostname,
        network,
        bridge: BridgeWishes::default(),
        ports: Vec::new(),
        mounts: Vec::new(),
        labels: BTreeMap::from([label]),
        limits,
        balloon: Balloon::Without,
        stop_grace: Duration::ZERO,
        kernel,
        when_stopped: WhenStopped::Remove,
    };
    New { initial: init, purpose: Purpose::Template, ..New::booting(spec) }
}

/// Digits at random, besides: one that failed may take a moment to go.
fn name(template: &Digest) -> VmName {
    let text = format!("template-{}-{}", template.short(), hex::encode(random::bytes::<4>()));
    text.parse().expect("letters, digits and dashes name a VM")
}
