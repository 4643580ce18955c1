//! Which VM a client means, and the way to its guest.

use std::time::Duration;

use imp_runtime::status::{State, VmStatus};
use imp_runtime::{GuestHold, Runtime, VmId};
use tonic::Status;

use crate::candidates::{self, Named};
use crate::refusal::refusal;

/// How long a VM that runs may take to be reached.
const PATIENCE: Duration = Duration::from_secs(20);

/// The VM that a user means, or whom they may have meant.
pub(crate) fn resolve(runtime: &Runtime, vm: &str) -> Result<VmId, Status> {
    let named = || -> Vec<Named> {
        let vms = runtime.list();
        vms.iter().map(|vm| Named { id: vm.id.to_string(), name: vm.name.to_string() }).collect()
    };
    runtime.resolve(vm).map_err(|error| match error {
        imp_runtime::Error::NoSuchVm { .. } => Status::not_found(candidates::unknown(vm, &named())),
        imp_runtime::Error::Ambiguous { .. } => Status::not_found(candidates::ambiguous(vm, &named())),
        error => refusal(&error),
    })
}

/// The guest of a VM that runs; one whose channel has broken, and an owner that has just taken the VM over, are given time
/// to find it.
pub(crate) async fn reach(runtime: &Runtime, id: &VmId) -> Result<GuestHold, Status> {
    let mut status = runtime.watch(id).map_err(|error| refusal(&error))?;
    let otherwise = tokio::select! {
        biased;
        connected = runtime.connected(id) => match connected {
            Ok(hold) => return Ok(hold),
            Err(error) => refusal(&error),
        },
        // An error: the VM has been removed.
        _ = status.wait_for(|vm| out_of_reach(vm).is_some()) => Status::not_found(format!("VM {id} is gone")),
        () = tokio::time::sleep(PATIENCE) => Status::unavailable(format!(
            "the guest has not been reached for {} s: see `imp logs --console {id}`",
            PATIENCE.as_secs(),
        )),
    };
    let why = out_of_reach(&status.borrow());
    Err(why.map_or(otherwise, Status::failed_precondition))
}

/// Why nothing can be done in a VM; none of one that runs.
fn out_of_reach(vm: &VmStatus) -> Option<String> {
    let name = &vm.name;
    match vm.state {
        State::Running => None,
        State::Prepared => Some(format!("{name} is prepared: only a VM that is activated can be reached")),
        State::Asleep => Some(format!("{name} stands still for a moment: try again")),
        State::Paused => Some(format!("{name} is paused: only a VM that runs can be reached")),
        State::Created => Some(format!("{name} has not been started: `imp rm {name}` removes it")),
        State::Starting => Some(format!("{name} is starting: try again when `imp ps` shows it running")),
        State::Stopping => Some(format!("{name} is stopping: only a VM that runs can be reached")),
        State::Stopped => Some(format!(
            "{name} has stopped, and a VM runs only once: start another one with `imp run`, or see `imp logs {name}`"
        )),
    }
}
