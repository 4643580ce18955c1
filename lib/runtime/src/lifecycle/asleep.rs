//! The life of a VM whose machine stands still, or is about to, or has just gone on.

use super::{After, Command, Deadline, Input, Phase, RECONNECT, Rest, Times, failed};
use crate::status::{Failure, Outcome, VmmEnd};

impl Phase {
    pub(super) fn on_asleep(self, input: Input, times: Times) -> (Self, Vec<Command>) {
        use Command as C;
        match (self, input) {
            (Self::Dormant, Input::Activate) => {
                (Self::Waking, vec![C::Arm(Deadline::Answer, times.answer), C::Wake])
            }
            (Self::Dormant | Self::Waking, Input::Failed(failure)) => Self::end(failed(failure)),
            (Self::Dormant, Input::VmmEnded(vmm)) => Self::clean_up(failed(Failure::EndedDormant { vmm })),
            (Self::Waking, Input::Woken) => (Self::Running, vec![C::FollowMain]),
            // A guest that does not confirm is never served.
            (Self::Waking, Input::DeadlinePassed(Deadline::Answer)) => {
                Self::end(failed(Failure::NoAnswer { seconds: times.answer.as_secs() }))
            }

            (Self::Sleeping { then: Rest::Snapshot(after) }, Input::Slept) => {
                (Self::Saving { after }, vec![C::Save])
            }
            (Self::Sleeping { then: Rest::Pause }, Input::Slept) => (Self::Pausing, vec![C::Pause]),
            (Self::Sleeping { .. }, Input::NotSlept) => (Self::Running, vec![C::FollowMain]),
            // It may sleep all the same.
            (
                Self::Sleeping { .. },
                Input::Failed(_) | Input::ChannelLost | Input::DeadlinePassed(Deadline::Sleep),
            ) => Self::rouse(),
            // Heard before the processes stood still.
            (Self::Sleeping { .. }, Input::MainEnded(outcome)) => Self::drain(outcome),
            (Self::Saving { after: After::GoOn }, Input::Saved) => Self::rouse(),
            (Self::Saving { after: After::Keep }, Input::Saved) => (Self::Keeping, vec![]),
            (Self::Keeping, Input::Kept) => Self::end(Outcome::Killed),
            (Self::Keeping, Input::NotKept) => Self::rouse(),
            (Self::Saving { after: After::GoOn | After::Keep }, Input::Failed(_)) => Self::rouse(),
            (Self::Saving { after: After::End }, Input::Saved) => Self::end(Outcome::Killed),
            (Self::Saving { after: After::End }, Input::Failed(failure)) => Self::end(failed(failure)),
            (Self::Pausing, Input::Halted) => (Self::Paused, vec![]),
            (Self::Pausing, Input::Failed(_)) => Self::rouse(),
            (Self::Paused, Input::Resume) => Self::rouse(),

            (Self::Rousing, Input::Woken) => (Self::Running, vec![C::FollowMain]),
            (Self::Rousing, Input::ChannelLost) => (Self::Rousing, vec![C::Rouse]),
            (Self::Rousing, Input::Failed(failure)) => Self::end(failed(failure)),
            (Self::Rousing, Input::DeadlinePassed(Deadline::Reconnect)) => {
                Self::end(failed(Failure::ChannelLost { seconds: RECONNECT.as_secs() }))
            }

            (
                Self::Dormant
                | Self::Waking
                | Self::Sleeping { .. }
                | Self::Saving { .. }
                | Self::Keeping
                | Self::Pausing
                | Self::Paused
                | Self::Rousing,
                Input::Kill | Input::Stop { .. },
            ) => Self::end(Outcome::Killed),
            (
                Self::Waking
                | Self::Sleeping { .. }
                | Self::Saving { .. }
                | Self::Keeping
                | Self::Pausing
                | Self::Paused
                | Self::Rousing,
                Input::VmmEnded(VmmEnd::PoweredOff),
            ) => Self::clean_up(Outcome::PoweredOff),
            (
                Self::Waking
                | Self::Sleeping { .. }
                | Self::Saving { .. }
                | Self::Keeping
                | Self::Pausing
                | Self::Paused
                | Self::Rousing,
                Input::VmmEnded(vmm),
            ) => Self::clean_up(failed(Failure::EndedWhileRunning { vmm })),

            // Too late, or nothing to do with this phase.
            (
                phase,
                Input::Start
                | Input::Prepared
                | Input::Spawned
                | Input::Loaded
                | Input::Activate
                | Input::Woken
                | Input::Rest(_)
                | Input::Slept
                | Input::NotSlept
                | Input::Saved
                | Input::Kept
                | Input::NotKept
                | Input::Halted
                | Input::Resume
                | Input::Answered
                | Input::Configured
                | Input::CopiedIn
                | Input::Initialised
                | Input::MainStarted
                | Input::Failed(_)
                | Input::MainEnded(_)
                | Input::Drained
                | Input::ChannelLost
                | Input::ChannelBack
                | Input::Stop { .. }
                | Input::Kill
                | Input::DeadlinePassed(_)
                | Input::VmmEnded(_)
                | Input::CleanedUp,
            ) => (phase, vec![]),
        }
    }

    pub(super) fn rouse() -> (Self, Vec<Command>) {
        (Self::Rousing, vec![Command::Arm(Deadline::Reconnect, RECONNECT), Command::Rouse])
    }
}
