//! The life of a VM that boots, runs and ends.

use super::{
    Command, DRAIN, Deadline, FALL_ASLEEP, Input, POWER_OFF, Phase, RECONNECT, START, Times, failed,
};
use crate::status::{Failure, Outcome, VmmEnd};

impl Phase {
    pub(super) fn on_awake(self, input: Input, times: Times) -> (Self, Vec<Command>) {
        use Command as C;
        match (self, input) {
            (Self::Created, Input::Start) => (Self::Preparing, vec![C::Prepare]),
            (Self::Created, Input::Kill | Input::Stop { .. }) => Self::clean_up(Outcome::Killed),
            (Self::Created, Input::DeadlinePassed(Deadline::Start)) => {
                Self::clean_up(failed(Failure::NeverStarted { seconds: START.as_secs() }))
            }

            (Self::Preparing, Input::Prepared) => (Self::Spawning, vec![C::Spawn]),
            (Self::Preparing | Self::Spawning, Input::Failed(failure)) => Self::clean_up(failed(failure)),
            (Self::Preparing | Self::Spawning, Input::Kill | Input::Stop { .. }) => {
                (Self::Abandoning { outcome: Outcome::Killed }, vec![])
            }
            (Self::Abandoning { outcome }, Input::Spawned | Input::Loaded) => Self::end(outcome),
            (Self::Abandoning { outcome }, Input::Prepared | Input::Failed(_)) => Self::clean_up(outcome),

            (Self::Spawning, Input::Spawned) => {
                (Self::Answering, vec![C::Arm(Deadline::Answer, times.answer), C::Greet])
            }
            (Self::Spawning, Input::Loaded) => (Self::Dormant, vec![]),
            (Self::Answering, Input::Answered) => (Self::Configuring, vec![C::Configure]),
            (Self::Configuring, Input::Configured) => (Self::CopyingIn, vec![C::CopyIn]),
            (Self::CopyingIn, Input::CopiedIn) => (Self::Initialising, vec![C::Initialise]),
            (Self::Initialising, Input::Initialised) => (Self::StartingMain, vec![C::StartMain]),
            (Self::StartingMain, Input::MainStarted) => (Self::Running, vec![]),

            (
                Self::Answering
                | Self::Configuring
                | Self::CopyingIn
                | Self::Initialising
                | Self::StartingMain,
                Input::Failed(failure),
            ) => Self::end(failed(failure)),
            (
                Self::Answering
                | Self::Configuring
                | Self::CopyingIn
                | Self::Initialising
                | Self::StartingMain,
                Input::Kill | Input::Stop { .. },
            ) => Self::end(Outcome::Killed),
            (Self::Answering | Self::Configuring, Input::DeadlinePassed(Deadline::Answer)) => {
                Self::end(failed(Failure::NoAnswer { seconds: times.answer.as_secs() }))
            }
            (
                Self::Configuring | Self::CopyingIn | Self::Initialising | Self::StartingMain,
                Input::ChannelLost,
            ) => Self::end(failed(Failure::ChannelLost { seconds: 0 })),
            (
                phase @ (Self::Answering
                | Self::Configuring
                | Self::CopyingIn
                | Self::Initialising
                | Self::StartingMain),
                Input::VmmEnded(vmm),
            ) => match phase {
                Self::StartingMain => Self::clean_up(failed(Failure::EndedWhileRunning { vmm })),
                _ => Self::clean_up(failed(Failure::EndedInBoot { vmm })),
            },

            (Self::Finding, Input::ChannelBack) => (Self::Finding, vec![C::FollowMain]),
            (Self::Finding, Input::MainStarted) => (Self::Running, vec![]),
            (Self::Finding, Input::ChannelLost) => (Self::Finding, vec![C::Reconnect]),
            // The guest does not know it, or says nothing at all.
            (Self::Finding, Input::Failed(_) | Input::DeadlinePassed(Deadline::Reconnect)) => {
                Self::end(failed(Failure::OwnerGone))
            }
            (Self::Finding, Input::Kill | Input::Stop { .. }) => Self::end(Outcome::Killed),
            (Self::Finding, Input::VmmEnded(_)) => Self::clean_up(failed(Failure::OwnerGone)),

            (
                Self::StartingMain | Self::Finding | Self::Running | Self::Reconnecting | Self::StoppingMain,
                Input::MainEnded(outcome),
            ) => Self::drain(outcome),
            (Self::Running, Input::ChannelLost) => {
                (Self::Reconnecting, vec![C::Arm(Deadline::Reconnect, RECONNECT), C::Reconnect])
            }
            // The channel works, but the guest does not know its main process.
            (Self::Running, Input::Failed(failure)) => Self::end(failed(failure)),
            (Self::Reconnecting, Input::ChannelBack) => (Self::Running, vec![C::FollowMain]),
            (Self::Reconnecting, Input::DeadlinePassed(Deadline::Reconnect)) => {
                Self::end(failed(Failure::ChannelLost { seconds: RECONNECT.as_secs() }))
            }
            (Self::Running, Input::Rest(then)) => {
                (Self::Sleeping { then }, vec![C::Arm(Deadline::Sleep, FALL_ASLEEP), C::Sleep])
            }
            (Self::Running, Input::Stop { grace }) => {
                (Self::StoppingMain, vec![C::Arm(Deadline::Grace, grace), C::SignalMain])
            }
            // Nobody can be asked to stop over a broken channel.
            (Self::Reconnecting, Input::Stop { .. }) => Self::end(Outcome::Killed),
            (Self::StoppingMain, Input::Stop { grace }) => {
                (Self::StoppingMain, vec![C::Arm(Deadline::Grace, grace)])
            }
            (Self::StoppingMain, Input::DeadlinePassed(Deadline::Grace) | Input::ChannelLost) => {
                Self::end(Outcome::Signalled { signal: 9, out_of_memory: false, timed_out: false })
            }
            (Self::Running | Self::Reconnecting | Self::StoppingMain, Input::Kill) => {
                Self::end(Outcome::Killed)
            }
            (
                Self::Running | Self::Reconnecting | Self::StoppingMain,
                Input::VmmEnded(VmmEnd::PoweredOff),
            ) => Self::clean_up(Outcome::PoweredOff),
            (Self::Running | Self::Reconnecting | Self::StoppingMain, Input::VmmEnded(vmm)) => {
                Self::clean_up(failed(Failure::EndedWhileRunning { vmm }))
            }

            (Self::Draining { outcome }, Input::Drained | Input::DeadlinePassed(Deadline::Drain)) => {
                (Self::ShuttingDown { outcome }, vec![C::Arm(Deadline::PowerOff, POWER_OFF), C::ShutDown])
            }
            (
                Self::ShuttingDown { outcome },
                Input::DeadlinePassed(Deadline::PowerOff) | Input::Failed(_),
            ) => Self::end(outcome),
            (
                Self::Draining { outcome } | Self::ShuttingDown { outcome },
                Input::Kill | Input::ChannelLost,
            ) => Self::end(outcome),
            (
                Self::Draining { outcome } | Self::ShuttingDown { outcome } | Self::Ending { outcome },
                Input::VmmEnded(_),
            ) => Self::clean_up(outcome),

            (Self::CleaningUp { outcome }, Input::CleanedUp) => (Self::Stopped { outcome }, vec![]),

            // Too late, or nothing to do with this phase.
            (
                phase,
                Input::Start
                | Input::Prepared
                | Input::Spawned
                | Input::Answered
                | Input::Configured
                | Input::CopiedIn
                | Input::Initialised
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

    /// The main process has ended.
    pub(super) fn drain(outcome: Outcome) -> (Self, Vec<Command>) {
        (Self::Draining { outcome }, vec![Command::Arm(Deadline::Drain, DRAIN), Command::Drain])
    }
}
