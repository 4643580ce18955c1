//! Whether the machine is awake, for all that must not happen while it sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tonic::Status;

#[derive(Debug, Default)]
pub(crate) struct Gate {
    asleep: AtomicBool,
    /// Held for reading by each start of a process: one that has begun is in its cgroup before that freezes.
    starts: Arc<RwLock<()>>,
}

/// A process may be started while this lives.
#[derive(Debug)]
pub(crate) struct Start {
    _guard: OwnedRwLockReadGuard<()>,
}

impl Gate {
    /// Refuses what a machine that sleeps does not serve.
    pub(crate) fn check(&self) -> Result<(), Status> {
        if self.asleep.load(Ordering::Acquire) {
            return Err(Status::unavailable(
                "the machine is asleep for a snapshot, or was made of one; it serves this after `Restore.Wake`",
            ));
        }
        Ok(())
    }

    pub(crate) async fn start(&self) -> Result<Start, Status> {
        let guard = Arc::clone(&self.starts).read_owned().await;
        self.check()?;
        Ok(Start { _guard: guard })
    }

    /// Returns when no process is being started any more.
    pub(super) async fn close(&self) {
        self.asleep.store(true, Ordering::Release);
        drop(self.starts.write().await);
    }

    pub(super) fn open(&self) {
        self.asleep.store(false, Ordering::Release);
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
}
