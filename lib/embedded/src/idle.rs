//! When an owner that nobody needs ends.

use std::future::Future;
use std::time::Duration;

use imp_runtime::Runtime;
use imp_runtime::status::VmStatus;
use tokio::sync::watch;

use crate::pools::Pools;
use crate::under_way::UnderWay;

/// How long all clients must have been away.
const REST: Duration = Duration::from_millis(500);

/// Returns once there has been neither a client nor a pool, nothing under way, nor a VM that needs its owner for the whole of
/// `after`.
pub(crate) async fn idle(
    runtime: &Runtime,
    pools: &Pools,
    under_way: &UnderWay,
    mut clients: watch::Receiver<usize>,
    after: Duration,
) {
    loop {
        if clients.wait_for(|clients| *clients == 0).await.is_err() {
            return;
        }
        let (mut events, mut steps) = (runtime.subscribe(), under_way.count());
        let is_busy = *steps.borrow_and_update() > 0;
        if is_busy || pools.is_any() || runtime.list().iter().any(|vm| needs_owner(vm)) {
            // Whatever changed, look again; so too when events were missed.
            first(clients.changed(), events.recv(), steps.changed()).await;
            continue;
        }
        let quiet =
            tokio::time::timeout(after, first(clients.changed(), events.recv(), steps.changed())).await;
        if quiet.is_err() {
            return;
        }
    }
}

/// Gives back, whenever all clients have left, what only serving them needed.
pub(crate) async fn rest(mut clients: watch::Receiver<usize>) {
    while clients.wait_for(|clients| *clients == 0).await.is_ok() {
        if tokio::time::timeout(REST, clients.changed()).await.is_ok() {
            continue;
        }
        imp_sys::heap::give_back();
        if let Err(error) = imp_sys::code::let_go() {
            tracing::debug!(%error, "the pages of the program stay");
        }
        if clients.changed().await.is_err() {
            return;
        }
    }
}

async fn first(one: impl Future, other: impl Future, third: impl Future) {
    tokio::select! {
        _ = one => {}
        _ = other => {}
        _ = third => {}
    }
}

/// A VM that is only on record waits for a user, not for its owner.
fn needs_owner(vm: &VmStatus) -> bool {
    vm.state.lives()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Engine;

    #[tokio::test]
    async fn an_owner_with_something_under_way_stays_until_that_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let Engine { layout, runtime, under_way } = Engine::open(folder.path()).await;
        let pools = Pools::open(&layout, runtime.clone(), under_way.clone()).await.unwrap();
        let step = under_way.begin().unwrap();
        let (_count, clients) = watch::channel(0);
        tokio::time::pause();
        let (after, long) = (Duration::from_secs(60), Duration::from_secs(3600));
        let mut idle = std::pin::pin!(idle(&runtime, &pools, &under_way, clients, after));
        assert!(tokio::time::timeout(long, &mut idle).await.is_err(), "it ends in the midst of a step");
        drop(step);
        tokio::time::timeout(long, idle).await.unwrap();
    }
}
