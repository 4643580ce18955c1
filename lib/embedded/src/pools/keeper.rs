//! The task that keeps a pool filled.

use std::collections::HashMap;
use std::future::pending;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use imp_protocol::causes::chain;
use imp_runtime::VmId;
use imp_runtime::status::{Event, Outcome, State, VmStatus};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::trouble::{Next, Trouble};
use super::{Pools, Record, child, is_of, lock};

/// How long the filling of a pool waits for claims, which want the processors now.
const CLAIMS_FIRST: Duration = Duration::from_secs(1);

/// Whoever drops it ends the filling, too.
pub(super) struct Keeper {
    pub(super) record: Record,
    trouble: Arc<Mutex<Trouble>>,
    end: DropGuard,
    task: JoinHandle<()>,
}

impl Keeper {
    pub(super) fn start(pools: &Pools, record: Record) -> Self {
        let (end, trouble) = (CancellationToken::new(), Arc::new(Mutex::new(Trouble::default())));
        // Before the first look, so that no change is missed.
        let changes = pools.0.runtime.subscribe();
        let waiting = pools.ready(&record).into_iter().map(|vm| (vm, Instant::now())).collect();
        let filling = Filling {
            pools: pools.clone(),
            record: record.clone(),
            end: end.clone(),
            trouble: Arc::clone(&trouble),
            changes,
            waiting,
        };
        let task = tokio::spawn(filling.run());
        Self { record, trouble, end: end.drop_guard(), task }
    }

    /// Returns when no VM is being prepared any more.
    pub(super) async fn end(self) -> Record {
        drop(self.end);
        // An error says that it ended by a bug of ours, and so it has ended.
        let _ = self.task.await;
        self.record
    }

    pub(super) fn why(&self) -> Option<String> {
        lock(&self.trouble).why()
    }
}

struct Filling {
    pools: Pools,
    record: Record,
    end: CancellationToken,
    trouble: Arc<Mutex<Trouble>>,
    changes: Receiver<Event>,
    /// VMs that are prepared, and since when.
    waiting: HashMap<VmId, Instant>,
}

impl Filling {
    /// Prepares VMs while there are too few, one at a time, until it is told to end or its owner ends.
    async fn run(mut self) {
        while !self.end.is_cancelled() {
            self.hear();
            let (ready, size) = (self.pools.ready(&self.record).len(), self.record.size as usize);
            let next = lock(&self.trouble).next(ready, size, Instant::now());
            match next {
                Next::Prepare => {
                    if self.prepare().await.is_break() {
                        return;
                    }
                }
                Next::Wait(until) => {
                    let over = async {
                        match until {
                            Some(until) => tokio::time::sleep_until(until.into()).await,
                            None => pending().await,
                        }
                    };
                    tokio::select! {
                        () = self.end.cancelled() => {}
                        () = over => {}
                        // An error: changes were missed.
                        event = self.changes.recv() => event.into_iter().for_each(|event| self.note(event)),
                    }
                }
            }
        }
    }

    async fn prepare(&mut self) -> ControlFlow<()> {
        let mut claims = self.pools.0.claims.subscribe();
        let _ = tokio::time::timeout(CLAIMS_FIRST, claims.wait_for(|claims| *claims == 0)).await;
        // Not left half way, by nobody.
        let Ok(step) = self.pools.0.under_way.begin() else { return ControlFlow::Break(()) };
        let prepared = self.pools.0.runtime.prepare(&self.record.snapshot, child(&self.record.name)).await;
        drop(step);
        let mut trouble = lock(&self.trouble);
        match prepared {
            Ok(vm) => {
                tracing::info!(%vm, pool = %self.record.name, "prepared");
                trouble.prepared();
            }
            Err(error) => {
                let error = chain(&error);
                trouble.not_prepared(error.clone(), Instant::now(), fastrand::u8(..));
                let failures = trouble.failures();
                tracing::warn!(pool = %self.record.name, failures, error, "no VM was prepared");
            }
        }
        ControlFlow::Continue(())
    }

    /// What has happened since the last time.
    fn hear(&mut self) {
        loop {
            match self.changes.try_recv() {
                Ok(event) => self.note(event),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Changed(vm) if is_of(&vm, &self.record) => self.look_at(&vm),
            Event::Changed(_) => {}
            Event::Removed(vm) => drop(self.waiting.remove(&vm)),
        }
    }

    fn look_at(&mut self, vm: &VmStatus) {
        match vm.state {
            State::Prepared => drop(self.waiting.entry(vm.id.clone()).or_insert_with(Instant::now)),
            State::Running => drop(self.waiting.remove(&vm.id)),
            State::Stopped => {
                let Some(since) = self.waiting.remove(&vm.id) else { return };
                let Some(outcome) = &vm.outcome else { return };
                if is_failure(outcome) {
                    let why = format!("{}, which waited, is gone: {outcome}", vm.name);
                    let mut trouble = lock(&self.trouble);
                    trouble.died(since.elapsed(), why, Instant::now(), fastrand::u8(..));
                    let (outcome, failures) = (outcome.to_string(), trouble.failures());
                    tracing::warn!(vm = %vm.id, pool = %self.record.name, failures, outcome, "a prepared VM has ended");
                }
            }
            // Being made, being taken, or on its way out.
            State::Created | State::Starting | State::Asleep | State::Paused | State::Stopping => {}
        }
    }
}

/// Whether it says something of VMs of this template; what a user did says nothing.
fn is_failure(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Killed => false,
        Outcome::Exited { .. }
        | Outcome::Signalled { .. }
        | Outcome::NotStarted { .. }
        | Outcome::PoweredOff
        | Outcome::Failed { .. } => true,
    }
}
