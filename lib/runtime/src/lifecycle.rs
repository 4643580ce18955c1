//! The life of one VM as a pure function: what happens to it, and what is to be done then.
//!
//! ```text
//! Created ─Start─► Preparing ─► Spawning ─► Answering ─► Configuring ─► CopyingIn ─► StartingMain ─► Running ◄─► Reconnecting
//!                     │            │            │             │             │             │           │ │            │
//!                     │            └────────────┴──── failure, Kill ────────┴─────────────┤      Stop │ │ main ended │
//!                     │                                                                   │           ▼ ▼            │
//!                     │                                                                   │  StoppingMain ─► Draining │
//!                     │                                                                   ▼           │  ▼           │
//!                     └── failure ──► CleaningUp ◄── the VMM has ended ── Ending ◄── deadline ── ShuttingDown        │
//!                                         │                                 ▲                                        │
//!                                         ▼                                 └──────────── deadline, Kill ────────────┘
//!                                      Stopped
//! ```
//!
//! The end of the VMM leads to `CleaningUp` from every phase in which one may run. What comes too late is ignored. A VM
//! whose owner ended before the record said that the main process runs goes on in `Finding`: the guest knows whether it
//! does.

use std::time::Duration;

use crate::status::{Failure, Outcome, State, VmmEnd};

/// What the guest gets to power off once it was asked to, before the VMM is killed.
pub(crate) const POWER_OFF: Duration = Duration::from_secs(10);
/// How long the last readers of the main process's output may hold up the end of the machine.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);
/// How long a VM that was created may wait to be started: whoever made it for themselves is gone by then.
pub(crate) const START: Duration = Duration::from_secs(120);
/// How long a broken channel may take to come back.
pub(crate) const RECONNECT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    Created,
    Preparing,
    Spawning,
    /// The VMM runs; the agent has not answered yet.
    Answering,
    Configuring,
    CopyingIn,
    StartingMain,
    /// Another owner may have started the main process; the guest is asked.
    Finding,
    Running,
    /// The channel broke while the main process ran.
    Reconnecting,
    /// The main process was sent its stop signal.
    StoppingMain,
    /// The main process has ended; readers get the rest.
    Draining {
        outcome: Outcome,
    },
    /// The guest was asked to power off.
    ShuttingDown {
        outcome: Outcome,
    },
    /// Killed before there was a VMM: waits for the step that is under way.
    Abandoning {
        outcome: Outcome,
    },
    /// The VMM was killed.
    Ending {
        outcome: Outcome,
    },
    CleaningUp {
        outcome: Outcome,
    },
    Stopped {
        outcome: Outcome,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    Start,
    Prepared,
    Spawned,
    Answered,
    Configured,
    CopiedIn,
    MainStarted,
    /// A step of the start failed.
    Failed(Failure),
    MainEnded(Outcome),
    Drained,
    ChannelLost,
    ChannelBack,
    /// Asked for by the user.
    Stop {
        grace: Duration,
    },
    Kill,
    DeadlinePassed(Deadline),
    VmmEnded(VmmEnd),
    CleanedUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Deadline {
    /// A created VM must have been started.
    Start,
    /// The agent must have answered.
    Answer,
    /// The main process must have ended after its stop signal.
    Grace,
    Drain,
    /// The guest must have powered off.
    PowerOff,
    Reconnect,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    /// Disks, initramfs, ports, network helper.
    Prepare,
    Spawn,
    /// Greet the agent until it answers.
    Greet,
    Configure,
    CopyIn,
    StartMain,
    /// Follow a main process that another owner, or an earlier channel, has started.
    FollowMain,
    Reconnect,
    /// Send the main process its stop signal.
    SignalMain,
    /// Wait until the last reader of the main process's output lets go.
    Drain,
    /// Take note of the main process's exit, then ask the guest to power off.
    ShutDown,
    KillVmm,
    CleanUp,
    Arm(Deadline, Duration),
}

/// What differs between VMs and matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Times {
    /// From the spawn to the agent's first answer.
    pub answer: Duration,
}

/// What an owner finds of a VM that it did not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Remains {
    /// Recorded as about to start or as booting. Its environment died with its owner, unless it reached the guest.
    Unfinished { vmm: VmmRemains },
    /// Its main process had been started.
    Started { vmm: VmmRemains },
    /// Its main process had ended, and the guest may have been told that this is known.
    Ended { vmm: VmmRemains, outcome: Outcome },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmmRemains {
    Alive,
    Gone,
}

impl Phase {
    /// Where the life of a new VM begins.
    pub(crate) fn created() -> (Self, Vec<Command>) {
        (Self::Created, vec![Command::Arm(Deadline::Start, START)])
    }

    /// Where the life of a found VM goes on.
    pub(crate) fn adopted(remains: Remains) -> (Self, Vec<Command>) {
        match remains {
            Remains::Unfinished { vmm: VmmRemains::Alive } => {
                (Self::Finding, vec![Command::Arm(Deadline::Reconnect, RECONNECT), Command::Reconnect])
            }
            Remains::Unfinished { vmm: VmmRemains::Gone } => Self::clean_up(failed(Failure::OwnerGone)),
            Remains::Started { vmm: VmmRemains::Alive } => {
                (Self::Reconnecting, vec![Command::Arm(Deadline::Reconnect, RECONNECT), Command::Reconnect])
            }
            Remains::Started { vmm: VmmRemains::Gone } => Self::clean_up(failed(Failure::GoneUnseen)),
            Remains::Ended { vmm: VmmRemains::Alive, outcome } => Self::end(outcome),
            Remains::Ended { vmm: VmmRemains::Gone, outcome } => Self::clean_up(outcome),
        }
    }

    /// The next phase and what is to be done on the way there, in this order.
    pub(crate) fn on(self, input: Input, times: Times) -> (Self, Vec<Command>) {
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
            (Self::Abandoning { outcome }, Input::Spawned) => Self::end(outcome),
            (Self::Abandoning { outcome }, Input::Prepared | Input::Failed(_)) => Self::clean_up(outcome),

            (Self::Spawning, Input::Spawned) => {
                (Self::Answering, vec![C::Arm(Deadline::Answer, times.answer), C::Greet])
            }
            (Self::Answering, Input::Answered) => (Self::Configuring, vec![C::Configure]),
            (Self::Configuring, Input::Configured) => (Self::CopyingIn, vec![C::CopyIn]),
            (Self::CopyingIn, Input::CopiedIn) => (Self::StartingMain, vec![C::StartMain]),
            (Self::StartingMain, Input::MainStarted) => (Self::Running, vec![]),

            (
                Self::Answering | Self::Configuring | Self::CopyingIn | Self::StartingMain,
                Input::Failed(failure),
            ) => Self::end(failed(failure)),
            (
                Self::Answering | Self::Configuring | Self::CopyingIn | Self::StartingMain,
                Input::Kill | Input::Stop { .. },
            ) => Self::end(Outcome::Killed),
            (Self::Answering | Self::Configuring, Input::DeadlinePassed(Deadline::Answer)) => {
                Self::end(failed(Failure::NoAnswer { seconds: times.answer.as_secs() }))
            }
            (Self::Configuring | Self::CopyingIn | Self::StartingMain, Input::ChannelLost) => {
                Self::end(failed(Failure::ChannelLost { seconds: 0 }))
            }
            (
                phase @ (Self::Answering | Self::Configuring | Self::CopyingIn | Self::StartingMain),
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
            ) => (Self::Draining { outcome }, vec![C::Arm(Deadline::Drain, DRAIN), C::Drain]),
            (Self::Running, Input::ChannelLost) => {
                (Self::Reconnecting, vec![C::Arm(Deadline::Reconnect, RECONNECT), C::Reconnect])
            }
            // The channel works, but the guest does not know its main process.
            (Self::Running, Input::Failed(failure)) => Self::end(failed(failure)),
            (Self::Reconnecting, Input::ChannelBack) => (Self::Running, vec![C::FollowMain]),
            (Self::Reconnecting, Input::DeadlinePassed(Deadline::Reconnect)) => {
                Self::end(failed(Failure::ChannelLost { seconds: RECONNECT.as_secs() }))
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

    fn end(outcome: Outcome) -> (Self, Vec<Command>) {
        (Self::Ending { outcome }, vec![Command::KillVmm])
    }

    fn clean_up(outcome: Outcome) -> (Self, Vec<Command>) {
        (Self::CleaningUp { outcome }, vec![Command::CleanUp])
    }

    pub(crate) fn state(&self) -> State {
        match self {
            Self::Created => State::Created,
            Self::Preparing
            | Self::Spawning
            | Self::Answering
            | Self::Configuring
            | Self::CopyingIn
            | Self::StartingMain
            | Self::Finding => State::Starting,
            Self::Running | Self::Reconnecting => State::Running,
            Self::StoppingMain
            | Self::Draining { .. }
            | Self::ShuttingDown { .. }
            | Self::Abandoning { .. }
            | Self::Ending { .. }
            | Self::CleaningUp { .. } => State::Stopping,
            Self::Stopped { .. } => State::Stopped,
        }
    }

    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        match self {
            Self::Draining { outcome }
            | Self::ShuttingDown { outcome }
            | Self::Abandoning { outcome }
            | Self::Ending { outcome }
            | Self::CleaningUp { outcome }
            | Self::Stopped { outcome } => Some(outcome),
            Self::Created
            | Self::Preparing
            | Self::Spawning
            | Self::Answering
            | Self::Configuring
            | Self::CopyingIn
            | Self::StartingMain
            | Self::Finding
            | Self::Running
            | Self::Reconnecting
            | Self::StoppingMain => None,
        }
    }
}

/// The console's last lines are added when the VM is cleaned up.
fn failed(failure: Failure) -> Outcome {
    Outcome::Failed { failure, console: Vec::new() }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
