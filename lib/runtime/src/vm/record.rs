//! What is known of a VM, kept on disk and told to whoever watches.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::{NotRemoved, Vm};
use crate::ledger::{self, Stage};
use crate::lifecycle::{Deadline, Input, Phase};
use crate::process::ProcessRecord;
use crate::spec::WhenStopped;
use crate::status::{self, Event, LostOutput, StageName};

impl Vm {
    /// Facts that an input brings, whatever the phase.
    pub(super) fn note(&mut self, input: &Input) {
        let stage = match (input, &self.phase) {
            (Input::Start, Phase::Created) => {
                self.began = Instant::now();
                return;
            }
            (Input::Prepared, Phase::Preparing) => StageName::Prepared,
            (Input::Spawned, Phase::Spawning) => StageName::Spawned,
            (Input::Answered, Phase::Answering) => StageName::Answered,
            (Input::Configured, Phase::Configuring) => StageName::Configured,
            (Input::CopiedIn, Phase::CopyingIn) => StageName::MountsCopied,
            (Input::Initialised, Phase::Initialising) => StageName::Initialised,
            (Input::Loaded, Phase::Spawning) => StageName::Loaded,
            (Input::Woken, Phase::Waking) => {
                self.record.status.started = Some(SystemTime::now());
                StageName::Woken
            }
            (Input::MainStarted, Phase::StartingMain) => {
                self.record.status.started = Some(SystemTime::now());
                StageName::MainStarted
            }
            (Input::Kept, Phase::Keeping) => {
                // It is no VM any more.
                self.record.spec.when_stopped = WhenStopped::Remove;
                return;
            }
            (Input::MainStarted, Phase::Finding) => {
                self.record.status.started = Some(SystemTime::now());
                return;
            }
            _ => return,
        };
        let milliseconds = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.record.status.stages.push(status::Stage { name: stage, milliseconds });
    }

    /// Puts into the record what the new phase makes true.
    pub(super) async fn keep(&mut self, before: &Phase) {
        let unreachable = matches!(self.phase, Phase::Reconnecting);
        self.record.status.unreachable_since = unreachable.then(SystemTime::now);
        match &self.phase {
            Phase::Running => {
                self.deadlines.retain(|(deadline, _)| *deadline == Deadline::Grace);
                match before {
                    Phase::StartingMain | Phase::Finding => self.stage(Stage::running).await,
                    // Somebody waits for it, and it ends with this machine.
                    Phase::Waking | Phase::Rousing | Phase::Sleeping { .. } => {
                        self.stage_unsynced(Stage::running).await;
                    }
                    _ => {}
                }
            }
            Phase::Dormant => self.stage_unsynced(|vmm| Stage::Dormant { vmm }).await,
            Phase::Waking => self.stage_unsynced(|vmm| Stage::Waking { vmm }).await,
            Phase::Sleeping { .. } => self.stage_unsynced(|vmm| Stage::Asleep { vmm }).await,
            Phase::Pausing => self.stage_unsynced(|vmm| Stage::Paused { vmm }).await,
            Phase::Rousing => self.stage_unsynced(|vmm| Stage::Asleep { vmm }).await,
            Phase::ShuttingDown { outcome } => {
                if let Some(vmm) = &self.vmm {
                    let (vmm, outcome) = (vmm.record().clone(), outcome.clone());
                    self.record.stage = Stage::Ended { vmm, outcome };
                    self.write().await;
                }
            }
            Phase::Draining { .. } | Phase::CleaningUp { .. } | Phase::Ending { .. } => {
                self.deadlines.retain(|(deadline, _)| *deadline == Deadline::PowerOff);
                // From here on its snapshot is what goes on, even if its VMM takes a moment to go.
                if let (Phase::Keeping, Phase::Ending { outcome }) = (before, &self.phase) {
                    let outcome = outcome.clone();
                    self.stage_unsynced(|vmm| Stage::Ended { vmm, outcome }).await;
                }
            }
            Phase::Stopped { outcome } => {
                self.record.status.outcome = Some(outcome.clone());
                self.record.status.ended = Some(SystemTime::now());
                self.record.status.vmm_pid = None;
                self.record.status.balloon = None;
                self.record.stage = Stage::Stopped;
                self.record.network = None;
                self.record.bridge = None;
                self.record.cgroups.clear();
                self.write().await;
            }
            Phase::Created
            | Phase::Preparing
            | Phase::Spawning
            | Phase::Answering
            | Phase::Configuring
            | Phase::CopyingIn
            | Phase::Initialising
            | Phase::StartingMain
            | Phase::Finding
            | Phase::Saving { .. }
            | Phase::Keeping
            | Phase::Paused
            | Phase::Reconnecting
            | Phase::StoppingMain
            | Phase::Abandoning { .. } => {}
        }
    }

    /// Writes the record off the thread that all VMs share. An owner that cannot write goes on: what it could not write
    /// is found by looking when the next one takes over.
    pub(super) async fn write(&self) {
        let (layout, record) = (self.layout.clone(), self.record.clone());
        let written = tokio::task::spawn_blocking(move || ledger::write(&layout, &record)).await;
        if let Ok(Err(error)) = written {
            tracing::error!(vm = %self.id, error = &error as &dyn std::error::Error, "cannot keep a record");
        }
    }

    /// Puts into the record what is true of the VMM that runs.
    async fn stage(&mut self, stage: impl FnOnce(ProcessRecord) -> Stage) {
        if let Some(vmm) = &self.vmm {
            self.record.stage = stage(vmm.record().clone());
            self.write().await;
        }
    }

    /// As `stage`, without waiting for the disk.
    async fn stage_unsynced(&mut self, stage: impl FnOnce(ProcessRecord) -> Stage) {
        let Some(vmm) = &self.vmm else { return };
        self.record.stage = stage(vmm.record().clone());
        self.write_unsynced().await;
    }

    /// As `write`, without waiting for the disk: of what ends with this machine.
    pub(super) async fn write_unsynced(&self) {
        let (layout, record) = (self.layout.clone(), self.record.clone());
        let written = tokio::task::spawn_blocking(move || ledger::write_unsynced(&layout, &record)).await;
        if let Ok(Err(error)) = written {
            tracing::error!(vm = %self.id, error = &error as &dyn std::error::Error, "cannot keep a record");
        }
    }

    pub(super) async fn lost(&mut self, lost: LostOutput) {
        tracing::warn!(vm = %self.id, bytes = lost.bytes, why = lost.why, "output of its program is not in its log");
        let before = self.record.status.lost_output.as_ref().map_or(0, |lost| lost.bytes);
        let bytes = before.saturating_add(lost.bytes);
        self.record.status.lost_output = Some(LostOutput { bytes, ..lost });
        // For the next owner. Where a full disk refuses it, the next write of the record has it.
        self.write_unsynced().await;
        self.publish();
    }

    pub(super) fn publish(&mut self) {
        self.record.status.state = self.phase.state();
        if !matches!(self.phase, Phase::Stopped { .. }) {
            self.record.status.outcome = None;
        }
        let status = Arc::new(self.record.status.clone());
        self.status.send_replace(Arc::clone(&status));
        // Nobody may be listening.
        let _ = self.context.events.send(Event::Changed(status));
    }

    pub(super) async fn remove(&mut self) -> Result<(), NotRemoved> {
        match self.phase {
            Phase::Created | Phase::Stopped { .. } => {
                let (context, layout, id) = (Arc::clone(&self.context), self.layout.clone(), self.id.clone());
                // Of a VM that was never started; it has no more than an address.
                let bridge = self.record.bridge.is_some();
                let blocking = tokio::task::spawn_blocking(move || {
                    if let Err(error) = context.keeper.unpin(&context.store, &id) {
                        tracing::warn!(vm = %id, %error, "a disk stays pinned until the next start");
                    }
                    if bridge && let Err(error) = context.bridges.disconnect(&id) {
                        tracing::warn!(vm = %id, %error, "an address stays leased until the next start");
                    }
                    ledger::remove(&layout)
                });
                blocking.await.unwrap_or(Ok(())).map_err(NotRemoved::Ledger)
            }
            _ => Err(NotRemoved::Lives { state: self.phase.state() }),
        }
    }
}
