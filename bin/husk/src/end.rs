//! How a husk leaves nothing.

use std::sync::Arc;
use std::time::Duration;

use imp_protocol::causes::chain;
use imp_runtime::VmId;
use tokio::time::timeout;

use crate::husk::Husk;
use crate::prepare::LABEL;

/// What the machine's program gets between its stop signal and SIGKILL: a template says nothing of it.
const GRACE: Duration = Duration::from_secs(10);
/// What cannot be ended by then is left to the next start.
const GONE: Duration = Duration::from_secs(60);

/// How the machine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Its main process is asked to end, and the guest to power off.
    Orderly,
    AtOnce,
}

/// Ends the machine, and takes away all that it and its forks had, but what machines of other husks were made of.
pub(crate) async fn end(husk: &Arc<Husk>, how: How) {
    husk.end();
    for fork in husk.forks() {
        husk.forget(&fork).await;
    }
    end_machines(husk, how).await;
    // One that was being made when the husk was to end.
    if timeout(GONE, husk.operations_over()).await.is_err() {
        tracing::error!("what is under way takes too long, and is left to the next start");
    }
    end_machines(husk, how).await;
}

async fn end_machines(husk: &Arc<Husk>, how: How) {
    let vms = husk.runtime.list();
    for vm in vms.iter().filter(|vm| vm.labels.contains_key(LABEL)) {
        match timeout(GONE, gone(husk, &vm.id, how)).await {
            Ok(Ok(())) => tracing::info!(vm = %vm.id, "the machine is gone"),
            Ok(Err(error)) => {
                tracing::error!(vm = %vm.id, error = chain(&error), "the machine is left to the next start");
            }
            Err(_) => {
                tracing::error!(vm = %vm.id, "the machine takes too long, and is left to the next start")
            }
        }
    }
}

async fn gone(husk: &Husk, id: &VmId, how: How) -> Result<(), imp_runtime::Error> {
    let ended = match how {
        How::Orderly => husk.runtime.stop(id, Some(GRACE)).await,
        How::AtOnce => husk.runtime.kill(id).await,
    };
    match ended {
        Ok(_) => {}
        Err(imp_runtime::Error::NoSuchVm { .. }) => return Ok(()),
        Err(error) => return Err(error),
    }
    match husk.runtime.remove(id).await {
        Ok(()) | Err(imp_runtime::Error::NoSuchVm { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
