//! When an owner that nobody needs ends.

use std::future::Future;
use std::time::Duration;

use imp_runtime::Runtime;
use imp_runtime::status::VmStatus;
use tokio::sync::watch;

use crate::pools::Pools;
use crate::server::lives;

/// How long all clients must have been away.
const REST: Duration = Duration::from_millis(500);

/// Returns once there has been neither a client nor a pool, nor a VM that needs its owner for the whole of `after`.
pub(crate) async fn idle(
    runtime: &Runtime,
    pools: &Pools,
    mut clients: watch::Receiver<usize>,
    after: Duration,
) {
    loop {
        if clients.wait_for(|clients| *clients == 0).await.is_err() {
            return;
        }
        let mut events = runtime.subscribe();
        if pools.is_any() || runtime.list().iter().any(|vm| needs_owner(vm)) {
            // Whatever changed, look again; so too when events were missed.
            first(clients.changed(), events.recv()).await;
            continue;
        }
        let quiet = tokio::time::timeout(after, first(clients.changed(), events.recv())).await;
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

async fn first(one: impl Future, other: impl Future) {
    tokio::select! {
        _ = one => {}
        _ = other => {}
    }
}

/// A VM that is only on record waits for a user, not for its owner.
fn needs_owner(vm: &VmStatus) -> bool {
    lives(vm.state)
}
