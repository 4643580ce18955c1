//! What an owner does not leave half way when it ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::Status;

/// How long such steps may take once the owner is to end.
const MOST: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(crate) struct UnderWay {
    steps: TaskTracker,
    /// Becomes true when the owner is to end.
    ending: Arc<watch::Sender<bool>>,
}

impl UnderWay {
    pub(crate) fn new(ending: Arc<watch::Sender<bool>>) -> Self {
        Self { steps: TaskTracker::new(), ending }
    }

    /// A step begins; it is under way while the answer is held. None begins in an owner that is to end: its client is told
    /// what it would be told by one that has ended.
    pub(crate) fn begin(&self) -> Result<TaskTrackerToken, Status> {
        let step = self.steps.token();
        if *self.ending.borrow() {
            return Err(Status::cancelled("this owner of the VMs is ending"));
        }
        Ok(step)
    }

    /// Lets no further step begin, and waits for those under way.
    pub(crate) async fn finish(&self) {
        self.ending.send_replace(true);
        self.steps.close();
        if tokio::time::timeout(MOST, self.steps.wait()).await.is_err() {
            tracing::warn!("ending in the midst of a step");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_step_under_way_is_waited_for_and_no_other_begins() {
        let under_way = UnderWay::new(Arc::new(watch::channel(false).0));
        let step = under_way.begin().unwrap();
        let mut finish = std::pin::pin!(under_way.finish());
        tokio::select! {
            biased;
            () = &mut finish => panic!("a step is under way"),
            () = std::future::ready(()) => {}
        }
        assert!(under_way.begin().is_err());
        drop(step);
        finish.await;
    }
}
