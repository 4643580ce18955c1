//! How a VM goes that removes itself when it has stopped, because its user wants that or because it has none.
//!
//! One that was taken over and ends soon afterwards by itself stays for a while: whoever was attached to it under the owner
//! before comes back for the rest of its output, and for how it ended.

use std::time::Duration;

use super::{Message, Next, Vm, spawn};
use crate::ledger::Purpose;
use crate::restore::CameTo;
use crate::spec::WhenStopped;
use crate::status::Outcome;

/// As long as a command looks for another owner.
const COME_BACK: Duration = Duration::from_secs(30);

impl Vm {
    /// Of a VM that has stopped.
    pub(super) async fn remove_itself(&mut self) -> Next {
        // Only the call that made it knows of it.
        let nobodys = self.record.purpose == Purpose::Call && CameTo::of(&self.record) == CameTo::Nothing;
        if self.record.spec.when_stopped != WhenStopped::Remove && !nobodys {
            return Next::GoOn;
        }
        let Some(stays) = self.stays() else { return self.leave().await };
        let messages = self.messages.clone();
        self.leaving = Some(spawn(async move {
            tokio::time::sleep(stays).await;
            let _ = messages.send(Message::Leave);
        }));
        Next::GoOn
    }

    pub(super) async fn leave(&mut self) -> Next {
        match self.remove().await {
            Ok(()) => return Next::Removed,
            Err(error) => tracing::error!(vm = %self.id, %error, "cannot remove a VM"),
        }
        Next::GoOn
    }

    fn stays(&self) -> Option<Duration> {
        match self.phase.outcome()? {
            Outcome::Exited { .. }
            | Outcome::Signalled { .. }
            | Outcome::NotStarted { .. }
            | Outcome::PoweredOff => {}
            // Its user knows, or it has nothing to tell.
            Outcome::Killed | Outcome::Failed { .. } => return None,
        }
        COME_BACK.checked_sub(self.taken_over?.elapsed())
    }
}
