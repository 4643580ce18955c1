//! From a VM on record to one whose program is about to run, also when its owner is replaced or dies meanwhile.

use imp_embedded::Owner;
use imp_embedded::client::{Attached, Error, Running};
use imp_runtime::status::{Failure, Outcome, Stage, State, VmStatus};
use tokio::task::JoinHandle;

use super::{Run, until_running};

/// Owners that may go, one after the other, before a VM has started; with more of them something is wrong.
pub(super) const MOST_CHANGES: u32 = 3;

/// Whether somebody was asked to start the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    NotYet,
    /// Perhaps in vain.
    ToStart,
}

/// How this command is with a VM that is about to run.
pub(super) enum Begun {
    Detached,
    /// With the stages of its start, if somebody wants to know them.
    Attached(Box<Attached>, Option<JoinHandle<Vec<Stage>>>),
}

/// What the next owner has made of the VM.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was given up before its program had run, and is gone: it can be made again.
    GivenUp,
    /// It goes on, or has come to an end of its own.
    Itself,
}

impl Run {
    /// Has the VM started, unless somebody was asked to already.
    pub(super) async fn begin(
        &self,
        owner: &Owner,
        vm: &VmStatus,
        asked: &mut Asked,
    ) -> Result<Begun, Error> {
        let id = vm.id.as_str();
        let begun = if self.detach {
            Begun::Detached
        } else {
            // Attached before the start: nothing of the output is missed.
            let attached = owner.attach(id, self.attachment(Some(0))).await?;
            // Asked for beside the run: a VM with --rm is gone in the end.
            let running = self.timings.then(|| tokio::spawn(until_running(owner.clone(), id.to_owned())));
            Begun::Attached(Box::new(attached), running)
        };
        if *asked == Asked::NotYet {
            *asked = Asked::ToStart;
            owner.start(id).await?;
        }
        Ok(begun)
    }
}

/// Looks, once another owner is there. A VM that was given up is removed, so that its name is free.
pub(super) async fn after_a_change(owner: &Owner, vm: &VmStatus, asked: Asked) -> Result<Found, Error> {
    let id = vm.id.as_str();
    match runs_or_has_stopped(owner, id).await {
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

/// A VM that is past running may still be on its way out, and what it comes to is not known yet.
async fn runs_or_has_stopped(owner: &Owner, id: &str) -> Result<VmStatus, Error> {
    let status = owner.wait(id, State::Running).await?;
    if status.state == State::Running { Ok(status) } else { owner.wait(id, State::Stopped).await }
}

/// An owner says so of a VM that it has found without a program.
fn never_ran(vm: &VmStatus) -> bool {
    matches!(vm.outcome, Some(Outcome::Failed { failure: Failure::OwnerGone, .. }))
}
