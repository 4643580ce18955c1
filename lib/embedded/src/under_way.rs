//! What is not left half way: neither when the owner ends, nor when whoever asked for it hangs up.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How long such steps may take once the owner is to end.
const MOST: Duration = Duration::from_secs(10);

/// Why something was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotDone {
    #[error("this owner of the VMs is ending")]
    Ending,
    #[error("the task was ended")]
    Ended,
}

#[derive(Clone)]
pub(crate) struct UnderWay {
    /// How many there are.
    steps: Arc<watch::Sender<usize>>,
    /// Becomes true when the owner is to end.
    ending: Arc<watch::Sender<bool>>,
}

/// A step that is under way while this lives.
#[derive(Debug)]
pub(crate) struct Step(Arc<watch::Sender<usize>>);

impl Drop for Step {
    fn drop(&mut self) {
        self.0.send_modify(|steps| *steps -= 1);
    }
}

impl UnderWay {
    pub(crate) fn new(ending: Arc<watch::Sender<bool>>) -> Self {
        Self { steps: Arc::new(watch::Sender::new(0)), ending }
    }

    /// None begins in an owner that is to end: its client is told what it would be told by one that has ended.
    pub(crate) fn begin(&self) -> Result<Step, NotDone> {
        self.steps.send_modify(|steps| *steps += 1);
        let step = Step(Arc::clone(&self.steps));
        // Counted first: whoever waits for all steps either waits for this one, or has forbidden it.
        if *self.ending.borrow() { Err(NotDone::Ending) } else { Ok(step) }
    }

    /// Does `work` as one step, to its end, also when nobody waits for it any more.
    pub(crate) async fn whole<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, NotDone> {
        let step = self.begin()?;
        let whole = tokio::spawn(async move {
            let done = work.await;
            drop(step);
            done
        });
        whole.await.map_err(|_| NotDone::Ended)
    }

    /// How many there are, now and later.
    pub(crate) fn count(&self) -> watch::Receiver<usize> {
        self.steps.subscribe()
    }

    /// Lets no further step begin, and waits for those under way.
    pub(crate) async fn finish(&self) {
        self.ending.send_replace(true);
        let mut count = self.count();
        if tokio::time::timeout(MOST, count.wait_for(|steps| *steps == 0)).await.is_err() {
            tracing::warn!("ending in the midst of a step");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    fn under_way() -> UnderWay {
        UnderWay::new(Arc::new(watch::channel(false).0))
    }

    async fn is_waiting(finish: &mut (impl Future<Output = ()> + Unpin)) -> bool {
        tokio::select! {
            biased;
            () = finish => false,
            () = std::future::ready(()) => true,
        }
    }

    #[tokio::test]
    async fn a_step_under_way_is_waited_for_and_no_other_begins() {
        let under_way = under_way();
        let step = under_way.begin().unwrap();
        let mut finish = pin!(under_way.finish());
        assert!(is_waiting(&mut finish).await);
        assert_eq!(under_way.begin().unwrap_err(), NotDone::Ending);
        drop(step);
        finish.await;
    }

    #[tokio::test]
    async fn what_is_done_as_a_whole_is_waited_for_also_when_whoever_asked_has_gone() {
        let under_way = under_way();
        let (go, went) = tokio::sync::oneshot::channel::<()>();
        let (done, is_done) = tokio::sync::oneshot::channel();
        {
            let mut asked = pin!(under_way.whole(async move {
                went.await.unwrap();
                done.send(()).unwrap();
            }));
            tokio::select! {
                biased;
                _ = &mut asked => panic!("nobody has let it go on"),
                () = std::future::ready(()) => {}
            }
        }
        let mut finish = pin!(under_way.finish());
        assert!(is_waiting(&mut finish).await);
        go.send(()).unwrap();
        finish.await;
        is_done.await.unwrap();
    }
}
