//! What is asked of a VM and takes a while: to become somebody's, and to have a snapshot made of it.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{Next, Vm, chain};
use crate::guest::restore::{Generation, MachineId, NewMachine, Wake};
use crate::ledger::Record;
use crate::lifecycle::{After, Input, Phase, Rest};
use crate::network;
use crate::ports::Published;
use crate::spec::{Identity, PublishedPort, VmName, WhenStopped};
use crate::status::{Failure, Outcome, Secrets, State, VmStatus};
use crate::vmm::snapshot::SnapshotFiles;

/// A dormant VM becomes somebody's.
pub(crate) struct Activation {
    pub becomes: Becomes,
    pub answer: oneshot::Sender<Result<Arc<VmStatus>, NotActivated>>,
}

/// As what a dormant VM goes on.
pub(crate) enum Becomes {
    New {
        identity: Identity,
        generation: Generation,
        machine_id: MachineId,
        given: Box<Given>,
    },
    /// As the one that it was: it is the only one.
    Same,
}

/// What a VM is given besides when somebody takes it.
#[derive(Default)]
pub(crate) struct Given {
    pub name: Option<VmName>,
    pub labels: BTreeMap<String, String>,
    pub ports: Vec<Published>,
    pub when_stopped: Option<WhenStopped>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotActivated {
    #[error("it is {state}: only a prepared VM is activated, and only once")]
    NotPrepared { state: State },
    #[error("its ports cannot be published: {why}")]
    NoPorts { why: String },
    #[error("it did not wake up: {outcome}")]
    Ended { outcome: Outcome },
}

/// A snapshot is made of a running VM, which goes on afterwards, or ends.
pub(crate) struct Save {
    pub files: SnapshotFiles,
    /// Where the copy of its scratch disk goes.
    pub scratch: PathBuf,
    pub after: After,
    pub answer: oneshot::Sender<Result<Saved, RestError>>,
    /// Nobody else puts it to sleep until it runs again.
    pub only: OwnedSemaphorePermit,
}

/// What a snapshot was made of.
pub(crate) struct Saved {
    pub record: Box<Record>,
    /// How long the machine stood still.
    pub paused: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestError {
    #[error("it is {state}: only a VM that runs can be put to sleep")]
    NotRunning { state: State },
    #[error("its guest cannot be reached at the moment: try again")]
    Unreachable,
    #[error("it is {state}: only a paused VM can go on")]
    NotPaused { state: State },
    #[error("its guest's agent is too old for snapshots: start the VM again")]
    OldAgent,
    #[error("{failure}")]
    Failed { failure: Failure },
    #[error("it ended meanwhile: {outcome}")]
    Ended { outcome: Outcome },
}

/// A VM is to be paused, or to go on.
pub(crate) type Ask = oneshot::Sender<Result<Arc<VmStatus>, RestError>>;

/// Those whose answers are awaited.
#[derive(Default)]
pub(super) struct Asks {
    pause: Option<Ask>,
    resume: Option<Ask>,
    activation: Option<Box<Activation>>,
    save: Option<Box<Save>>,
    saved: Option<Saved>,
}

impl Asks {
    pub(super) fn save(&self) -> Option<&Save> {
        self.save.as_deref()
    }

    pub(super) fn saved(&mut self, saved: Saved) {
        self.saved = Some(saved);
    }
}

impl Vm {
    pub(super) async fn asked_to_activate(&mut self, mut activation: Box<Activation>) -> Next {
        if self.phase != Phase::Dormant {
            let refused = NotActivated::NotPrepared { state: self.phase.state() };
            // Whoever asked may be gone.
            let _ = activation.answer.send(Err(refused));
            return Next::GoOn;
        }
        if let Becomes::New { identity, given, .. } = &mut activation.becomes {
            if let Err(why) = self.give(std::mem::take(given)).await {
                let _ = activation.answer.send(Err(NotActivated::NoPorts { why }));
                return Next::GoOn;
            }
            if !identity.secrets.expose().is_empty() {
                self.record.status.secrets = Secrets::Held;
            }
            if let Some(hostname) = &identity.hostname {
                self.record.spec.hostname = hostname.clone();
            }
        }
        self.asks.activation = Some(activation);
        self.began = std::time::Instant::now();
        self.happened(Input::Activate).await
    }

    /// Whoever took it wants it so. Without its ports it is of no use to them.
    async fn give(&mut self, given: Box<Given>) -> Result<(), String> {
        let Given { name, labels, ports, when_stopped } = *given;
        self.record.status.ports.extend(ports.iter().map(|port| port.facts.clone()));
        if let (Some(bridge), false) = (&mut self.record.bridge, ports.is_empty()) {
            bridge.publish = network::bridge::published(&self.record.status.ports);
            let (context, network) = (Arc::clone(&self.context), bridge.clone());
            let connected = tokio::task::spawn_blocking(move || context.bridges.connect(&network)).await;
            connected.map_err(|error| error.to_string())?.map_err(|error| chain(&error))?;
        }
        let asked = ports.iter().filter_map(|port| {
            let guest = NonZeroU16::new(port.facts.guest)?;
            Some(PublishedPort { host: port.facts.host, guest })
        });
        self.record.spec.ports.extend(asked);
        self.ports.extend(ports);
        if let Some(name) = name {
            self.record.status.name = name.clone();
            self.record.spec.name = name;
        }
        self.record.spec.labels.extend(labels);
        self.record.status.labels = self.record.spec.labels.clone();
        if let Some(when_stopped) = when_stopped {
            self.record.spec.when_stopped = when_stopped;
        }
        Ok(())
    }

    /// What the guest of the VM that is being activated is told.
    pub(super) fn wake_as(&self) -> Option<Wake> {
        let (identity, generation, machine_id) = match &self.asks.activation.as_deref()?.becomes {
            Becomes::Same => return Some(Wake::Same),
            Becomes::New { identity, generation, machine_id, given: _ } => (identity, generation, machine_id),
        };
        Some(Wake::New(Box::new(NewMachine {
            generation: generation.clone(),
            hostname: self.record.spec.hostname.clone(),
            machine_id: *machine_id,
            network: network::interface(&self.record.status.network),
            hosts: Vec::new(),
            environment: identity.environment.clone(),
            secrets: identity.secrets.clone(),
        })))
    }

    pub(super) async fn asked_to_save(&mut self, save: Box<Save>) -> Next {
        if self.phase != Phase::Running {
            let _ = save.answer.send(Err(self.cannot_sleep()));
            return Next::GoOn;
        }
        let rest = Rest::Snapshot(save.after);
        self.asks.save = Some(save);
        self.happened(Input::Rest(rest)).await
    }

    pub(super) async fn asked_to_pause(&mut self, ask: Ask) -> Next {
        if self.phase != Phase::Running {
            let _ = ask.send(Err(self.cannot_sleep()));
            return Next::GoOn;
        }
        self.asks.pause = Some(ask);
        self.happened(Input::Rest(Rest::Pause)).await
    }

    pub(super) async fn asked_to_resume(&mut self, ask: Ask) -> Next {
        if self.phase != Phase::Paused {
            let _ = ask.send(Err(RestError::NotPaused { state: self.phase.state() }));
            return Next::GoOn;
        }
        self.asks.resume = Some(ask);
        self.happened(Input::Resume).await
    }

    fn cannot_sleep(&self) -> RestError {
        match self.phase {
            Phase::Reconnecting => RestError::Unreachable,
            _ => RestError::NotRunning { state: self.phase.state() },
        }
    }

    /// Answers those who have theirs with what has just happened.
    pub(super) fn settle(&mut self, input: &Input) {
        let outcome = self.phase.outcome().cloned();
        let waits = matches!(self.phase, Phase::Sleeping { .. } | Phase::Saving { .. });
        if let Some(save) = self.asks.save.take_if(|_| !waits) {
            let answer = self.asks.saved.take().ok_or_else(|| not_put_to_sleep(input, outcome.as_ref()));
            let Save { answer: asked, only, .. } = *save;
            // Kept until the VM runs again.
            self.resting = Some(only);
            // Whoever asked may be gone.
            let _ = asked.send(answer);
        }
        if self.phase == Phase::Running || outcome.is_some() {
            self.resting = None;
        }
        let waits = matches!(self.phase, Phase::Sleeping { .. } | Phase::Pausing);
        if let Some(ask) = self.asks.pause.take_if(|_| !waits) {
            let answer = match self.phase {
                Phase::Paused => Ok(Arc::clone(&self.status.borrow())),
                _ => Err(not_put_to_sleep(input, outcome.as_ref())),
            };
            let _ = ask.send(answer);
        }
        if let Some(ask) = self.asks.resume.take_if(|_| self.phase == Phase::Running || outcome.is_some()) {
            let answer = match &outcome {
                None => Ok(Arc::clone(&self.status.borrow())),
                Some(outcome) => Err(RestError::Ended { outcome: outcome.clone() }),
            };
            let _ = ask.send(answer);
        }
        let stopped = matches!(self.phase, Phase::Stopped { .. });
        match (outcome, self.asks.activation.take_if(|_| self.phase == Phase::Running || stopped)) {
            (None, Some(activation)) => {
                let _ = activation.answer.send(Ok(Arc::clone(&self.status.borrow())));
            }
            (Some(outcome), Some(activation)) => {
                let _ = activation.answer.send(Err(NotActivated::Ended { outcome }));
            }
            (_, None) => {}
        }
    }
}

fn not_put_to_sleep(input: &Input, outcome: Option<&Outcome>) -> RestError {
    match (input, outcome) {
        (Input::NotSlept, _) => RestError::OldAgent,
        (Input::Failed(failure), _) => RestError::Failed { failure: failure.clone() },
        (_, Some(outcome)) => RestError::Ended { outcome: outcome.clone() },
        (_, None) => RestError::Failed { failure: Failure::NoSleep },
    }
}
