//! The husk: one machine, and who may have what done with it. An operation runs to its end whoever asked for it is gone.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use imp_runtime::status::{State as VmState, VmStatus};
use imp_runtime::{Runtime, VmId};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::layout::Layout;
use crate::lifecycle::{Ask, Beginning, Lifecycle, Machine, Outcome, Refused, State};
use crate::protocol::{Answer, Facts, Id, Op, Request};
use crate::refusal::{Refusal, how};

/// What a husk may take for each request, at the most; a client may want it sooner.
pub(crate) fn longest(op: Op) -> Duration {
    Duration::from_secs(match op {
        // The first use of a snapshot on a machine reads all of it.
        Op::Prepare => 180,
        Op::Activate => 120,
        Op::ForkSnapshot => 120,
        Op::RemoveForkSnapshot => 60,
        Op::Status => 5,
    })
}

/// When an operation must be over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    allowed: Duration,
}

impl Deadline {
    /// `began`: when it was said what is wanted.
    pub(crate) fn from(began: Instant, wanted: Option<Duration>, longest: Duration) -> Self {
        let allowed = wanted.unwrap_or(longest).min(longest);
        Self { at: began + allowed, allowed }
    }

    pub(crate) fn late(self) -> Refusal {
        Refusal::Late(self.allowed)
    }
}

pub(crate) struct Husk {
    pub(crate) runtime: Runtime,
    pub(crate) layout: Layout,
    /// What its machine is called.
    pub(crate) vm: Id,
    known: Mutex<Known>,
    operations: TaskTracker,
    /// Cancelled when the husk is to end.
    pub(crate) ending: CancellationToken,
}

struct Known {
    lifecycle: Lifecycle,
    /// The machine, once there is one.
    machine: Option<VmId>,
    /// Snapshots for forks that have not been removed.
    forks: Vec<Id>,
}

impl Husk {
    /// `machine`: what is there already.
    pub(crate) fn new(
        runtime: Runtime,
        layout: Layout,
        vm: Id,
        machine: Option<(VmId, Machine)>,
        forks: Vec<Id>,
    ) -> Arc<Self> {
        let (id, machine) = machine.map_or((None, Machine::New), |(id, machine)| (Some(id), machine));
        let lifecycle = Lifecycle::new(machine);
        let known = Mutex::new(Known { lifecycle, machine: id.clone(), forks });
        let (operations, ending) = (TaskTracker::new(), CancellationToken::new());
        let husk = Arc::new(Self { runtime, layout, vm, known, operations, ending });
        if let Some(id) = id {
            husk.watch(&id);
        }
        husk
    }

    pub(crate) async fn answer(self: &Arc<Self>, request: Request, deadline: Deadline) -> Answer {
        let began = Instant::now();
        let answered = match request {
            // Nothing of it is begun.
            _ if began >= deadline.at => Err(deadline.late()),
            Request::Prepare(request) => self.prepare(request, deadline).await,
            Request::Activate(request) => self.activate(*request, deadline).await,
            Request::ForkSnapshot(request) => self.fork_snapshot(request, deadline).await,
            Request::RemoveForkSnapshot(request) => self.remove_fork_snapshot(request, deadline).await,
            Request::Status => Ok(self.status()),
        };
        let mut answer = answered.unwrap_or_else(|refusal| refusal.answer());
        answer.latency_ms = began.elapsed();
        answer
    }

    /// The answer is not good when the machine has ended or the husk is ending: whoever only asks that knows enough.
    fn status(&self) -> Answer {
        let facts = self.facts();
        let state = self.known().lifecycle.state();
        let mut answer = match state {
            State::Ended => Refusal::Lifecycle(Refused::Ended).answer(),
            State::Ending => Refusal::Lifecycle(Refused::Ending).answer(),
            State::New
            | State::Preparing
            | State::Dormant
            | State::Activating
            | State::Active
            | State::Forking => Answer::good(),
        };
        answer.facts = Some(facts);
        answer
    }

    pub(crate) fn facts(&self) -> Facts {
        let (state, machine, forks) = {
            let known = self.known();
            let forks = known.forks.iter().map(|fork| fork.as_str().to_owned()).collect();
            (known.lifecycle.state(), known.machine.clone(), forks)
        };
        let vm = machine.as_ref().and_then(|id| self.runtime.get(id).ok());
        let vm = vm.as_deref();
        Facts {
            state: word(state),
            pid: std::process::id(),
            vm_id: self.vm.as_str().to_owned(),
            machine: machine.map(|id| id.to_string()),
            vmm_pid: vm.and_then(|vm| vm.vmm_pid),
            snapshot: vm.and_then(|vm| Some(vm.made_of?.to_string())),
            holds_secrets: vm.is_some_and(|vm| vm.secrets == imp_runtime::status::Secrets::Held),
            forks,
            outcome: vm.and_then(|vm| vm.outcome.clone()),
        }
    }

    /// Refuses what could not begin, before anything of the request is looked at.
    pub(crate) fn may(&self, ask: Ask) -> Result<(), Refusal> {
        match self.known().lifecycle.may(ask) {
            // It may name what is to be prepared.
            Ok(_) | Err(Refused::NotPrepared) => Ok(()),
            Err(refused) => Err(refused.into()),
        }
    }

    /// Refuses what is asked for, or takes it on.
    pub(crate) fn begin(&self, ask: Ask) -> Result<(), Refusal> {
        Ok(self.known().lifecycle.begin(ask)?)
    }

    pub(crate) fn begin_activation(
        &self,
        snapshot: Option<imp_runtime::Digest>,
    ) -> Result<Beginning, Refusal> {
        Ok(self.known().lifecycle.begin_activation(snapshot)?)
    }

    pub(crate) fn over(&self, outcome: Outcome) {
        let is_ending = {
            let mut known = self.known();
            known.lifecycle.over(outcome);
            known.lifecycle.is_ending()
        };
        if is_ending {
            self.ending.cancel();
        }
    }

    /// What an operation that was begun comes to, if it does so in time. It goes on without, and is given to `abandon`.
    pub(crate) async fn in_time<T: Send + 'static>(
        &self,
        deadline: Deadline,
        operation: impl Future<Output = Result<T, Refusal>> + Send + 'static,
        abandon: impl FnOnce(JoinHandle<Result<T, Refusal>>),
    ) -> Result<T, Refusal> {
        let mut operation = self.operations.spawn(operation);
        match timeout_at(deadline.at, &mut operation).await {
            Ok(Ok(result)) => result,
            // It panicked, and nobody knows how far it came.
            Ok(Err(_)) => {
                self.end();
                Err(Refusal::Broken)
            }
            Err(_) => {
                let is_ending = {
                    let mut known = self.known();
                    known.lifecycle.late();
                    known.lifecycle.is_ending()
                };
                if is_ending {
                    tracing::error!("an operation is late: the husk ends");
                    self.ending.cancel();
                }
                abandon(operation);
                Err(deadline.late())
            }
        }
    }

    pub(crate) fn end(&self) {
        self.known().lifecycle.end();
        self.ending.cancel();
    }

    /// Waits until nothing is under way; nothing is begun any more.
    pub(crate) async fn operations_over(&self) {
        self.operations.close();
        self.operations.wait().await;
    }

    pub(crate) fn machine(&self) -> Option<VmId> {
        self.known().machine.clone()
    }

    /// There is a machine from here on.
    pub(crate) fn has_machine(self: &Arc<Self>, id: &VmId) {
        self.known().machine = Some(id.clone());
        self.watch(id);
    }

    pub(crate) fn add_fork(&self, fork: Id) {
        self.known().forks.push(fork);
    }

    pub(crate) fn remove_fork(&self, fork: &Id) {
        self.known().forks.retain(|known| known != fork);
    }

    pub(crate) fn forks(&self) -> Vec<Id> {
        self.known().forks.clone()
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.layout.workdir.join("images/snapshots")
    }

    pub(crate) fn vm_status(&self, id: &VmId) -> Result<Arc<VmStatus>, Refusal> {
        self.runtime.get(id).map_err(|_| Refusal::Gone { id: id.clone() })
    }

    /// Says so as soon as the machine has ended.
    fn watch(self: &Arc<Self>, id: &VmId) {
        let Ok(mut status) = self.runtime.watch(id) else {
            self.known().lifecycle.machine_ended();
            return;
        };
        let husk = Arc::clone(self);
        tokio::spawn(async move {
            // An error: it was removed, and has ended before.
            let ended = status.wait_for(|vm| matches!(vm.state, VmState::Stopping | VmState::Stopped)).await;
            let how = ended.ok().and_then(|vm| vm.outcome.as_ref().map(how)).unwrap_or_default();
            husk.known().lifecycle.machine_ended();
            if !husk.ending.is_cancelled() {
                tracing::error!(how, "the machine has ended");
            }
        });
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn word(state: State) -> &'static str {
    match state {
        State::New => "new",
        State::Preparing => "preparing",
        State::Dormant => "dormant",
        State::Activating => "activating",
        State::Active => "active",
        State::Forking => "forking",
        State::Ended => "ended",
        State::Ending => "ending",
    }
}
