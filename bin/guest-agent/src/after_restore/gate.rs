//! Whether the machine is awake, for all that must not happen while it sleeps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};
use tokio::time::Instant;
use tonic::Status;

/// A connection that broke with a snapshot may be seen to have broken so long after the machine woke.
const SEEN: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Gate {
    state: watch::Sender<State>,
    /// Held for reading by each start of a process: one that has begun is in its cgroup before that freezes.
    starts: Arc<RwLock<()>>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Since when, if it has ever slept.
    Awake(Option<Instant>),
    Asleep,
}

impl Default for Gate {
    fn default() -> Self {
        Self { state: watch::Sender::new(State::Awake(None)), starts: Arc::default() }
    }
}

/// A process may be started while this lives.
#[derive(Debug)]
pub(crate) struct Start {
    _guard: OwnedRwLockReadGuard<()>,
}

impl Gate {
    /// Refuses what a machine that sleeps does not serve.
    pub(crate) fn check(&self) -> Result<(), Status> {
        match *self.state.borrow() {
            State::Awake(_) => Ok(()),
            State::Asleep => Err(Status::unavailable(
                "the machine is asleep for a snapshot, or was made of one; it serves this after `Restore.Wake`",
            )),
        }
    }

    pub(crate) async fn start(&self) -> Result<Start, Status> {
        let guard = Arc::clone(&self.starts).read_owned().await;
        self.check()?;
        Ok(Start { _guard: guard })
    }

    /// Whether a stream that breaks now does so because of a snapshot, and not because its host is gone.
    pub(crate) fn excuses_a_break(&self) -> bool {
        match *self.state.borrow() {
            State::Awake(since) => since.is_some_and(|since| since.elapsed() < SEEN),
            State::Asleep => true,
        }
    }

    pub(crate) async fn awake(&self) {
        let mut state = self.state.subscribe();
        // An error says that nobody can put it to sleep any more.
        let _ = state.wait_for(|state| matches!(state, State::Awake(_))).await;
    }

    /// Returns when no process is being started any more.
    pub(super) async fn close(&self) {
        self.state.send_replace(State::Asleep);
        drop(self.starts.write().await);
    }

    pub(super) fn open(&self) {
        self.state.send_replace(State::Awake(Some(Instant::now())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_start_that_has_begun_is_waited_for_and_a_later_one_is_refused() {
        let gate = Arc::new(Gate::default());
        let begun = gate.start().await.unwrap();
        let closing = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.close().await }
        });
        while gate.check().is_ok() {
            tokio::task::yield_now().await;
        }
        assert!(!closing.is_finished());
        drop(begun);
        closing.await.unwrap();
        assert_eq!(gate.start().await.unwrap_err().code(), tonic::Code::Unavailable);
        gate.open();
        gate.start().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_break_near_a_snapshot_is_excused() {
        let gate = Gate::default();
        assert!(!gate.excuses_a_break());
        gate.close().await;
        assert!(gate.excuses_a_break());
        gate.open();
        gate.awake().await;
        assert!(gate.excuses_a_break());
        tokio::time::advance(SEEN).await;
        assert!(!gate.excuses_a_break());
    }
}
