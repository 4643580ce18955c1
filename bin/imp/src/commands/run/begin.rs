//! From a VM on record to one whose program is about to run, also when its owner is replaced or dies meanwhile.

use imp_embedded::Owner;
use imp_embedded::client::{Error, Running};
use imp_runtime::status::{Failure, Outcome, State, VmStatus};

/// Owners that may go, one after the other, before a VM has started; with more of them something is wrong.
pub(super) const MOST_CHANGES: u32 = 3;

/// Whether somebody was asked to start the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    NotYet,
    /// Perhaps in vain.
    ToStart,
}

/// What the next owner has made of the VM.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was given up before its program had run, and is gone: it can be made again.
    GivenUp,
    /// It goes on, or has come to an end of its own.
    Itself,
}

/// Looks, once another owner is there. A VM that was given up is removed, so that its name is free.
pub(super) async fn after_a_change(owner: &Owner, vm: &VmStatus, asked: Asked) -> Result<Found, Error> {
    let id = vm.id.as_str();
    match owner.wait(id, State::Running).await {
        Ok(now) if never_ran(&now) => match owner.remove(id, Running::Refuse).await {
            Err(error) if !error.is_unknown_vm() => Err(error),
            Ok(_) | Err(_) => Ok(Found::GivenUp),
        },
        Ok(_) => Ok(Found::Itself),
        // With --rm it removes itself. Had it been started, nobody knows any more whether it ran.
        Err(error) if error.is_unknown_vm() && asked == Asked::NotYet => Ok(Found::GivenUp),
        Err(error) => Err(error),
    }
}

/// An owner says so of a VM that it has found without a program.
fn never_ran(vm: &VmStatus) -> bool {
    matches!(vm.outcome, Some(Outcome::Failed { failure: Failure::OwnerGone, .. }))
}
