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
//!
//! A VM that is made of a snapshot has no boot, and one that runs may be put to sleep ([`asleep`]):
//!
//! ```text
//! Created ─Start─► Preparing ─► Spawning ─Loaded─► Dormant ─Activate─► Waking ─► Running
//!
//! Running ─Save──► Sleeping ─► Saving ──┬─► Rousing ─► Running
//! Running ─Pause─► Sleeping ─► Pausing ─┴─failure─► Rousing
//!                                └─► Paused ─Resume─► Rousing
//!
//! Running ─Save──► Sleeping ─► Saving ─► Keeping ─Kept─► Ending           put away: its snapshot is safe
//!                                         └─NotKept─► Rousing
//! ```
//!
//! Whatever goes wrong between `Sleeping` and `Rousing`, the machine goes on: `Rousing` begins with that.

use std::time::Duration;

use crate::status::{Failure, Outcome, State, VmmEnd};

mod asleep;
mod awake;

/// What the guest gets to power off once it was asked to, before the VMM is killed.
pub(crate) const POWER_OFF: Duration = Duration::from_secs(10);
/// How long the last readers of the main process's output may hold up the end of the machine.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);
/// How long a VM that was created may wait to be started: whoever made it for themselves is gone by then.
pub(crate) const START: Duration = Duration::from_secs(120);
/// How long a broken channel may take to come back.
pub(crate) const RECONNECT: Duration = Duration::from_secs(30);
/// How long a guest may take to freeze its processes and write its file systems back: with gigabytes that are not yet on a
/// slow disk, more than a minute.
pub(crate) const FALL_ASLEEP: Duration = Duration::from_secs(90);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    Created,
    Preparing,
    Spawning,
    /// The VMM runs; the agent has not answered yet.
    Answering,
    Configuring,
    CopyingIn,
    /// Commands that a template begins with run.
    Initialising,
    StartingMain,
    /// Loaded from a snapshot and paused; nobody's yet.
    Dormant,
    /// The new machine runs; its guest repairs what it shares with others made of that snapshot.
    Waking,
    /// Another owner may have started the main process; the guest is asked.
    Finding,
    Running,
    /// The channel broke while the main process ran.
    Reconnecting,
    /// The guest freezes its processes.
    Sleeping {
        then: Rest,
    },
    /// Paused, while its memory, state and disk are written.
    Saving {
        after: After,
    },
    /// Written down; it stands still until what was written is safe, and nobody but who put it away has it go on.
    Keeping,
    Pausing,
    /// Until its user wants it to go on.
    Paused,
    /// Resumed; the guest is asked to let its processes run again.
    Rousing,
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

/// What a running VM is put to sleep for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    Snapshot(After),
    Pause,
}

/// What becomes of a machine of which a snapshot was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    GoOn,
    /// It was there for the snapshot alone.
    End,
    /// It stands still until the snapshot is safe, and then ends.
    Keep,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    Start,
    Prepared,
    Spawned,
    /// As `Spawned`, of a machine that was made of a snapshot.
    Loaded,
    /// The dormant VM becomes somebody's.
    Activate,
    /// The guest confirmed what had to be.
    Woken,
    /// A snapshot, or a pause, was asked for.
    Rest(Rest),
    Slept,
    /// The guest's agent knows no sleep: everything runs on.
    NotSlept,
    Saved,
    /// What was written down of it is safe.
    Kept,
    /// It could not be kept.
    NotKept,
    Halted,
    /// Asked for by the user.
    Resume,
    Answered,
    Configured,
    CopiedIn,
    Initialised,
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
    /// The guest's processes must stand still.
    Sleep,
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
    Initialise,
    StartMain,
    /// Follow a main process that another owner, or an earlier channel, has started.
    FollowMain,
    Reconnect,
    /// Resume the new machine, and have its guest become who it is to be.
    Wake,
    /// Have the guest freeze its processes and write back what it holds.
    Sleep,
    /// Pause, write memory, state and disk.
    Save,
    Pause,
    /// Attach to what another owner has left dormant.
    Attach,
    /// Resume, whatever it was paused for, and have the guest's processes run again.
    Rouse,
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
    Unfinished {
        vmm: VmmRemains,
    },
    /// Its main process had been started.
    Started {
        vmm: VmmRemains,
    },
    /// Its main process had ended, and the guest may have been told that this is known.
    Ended {
        vmm: VmmRemains,
        outcome: Outcome,
    },
    /// Its snapshot had been loaded, and nobody had it yet.
    Dormant {
        vmm: VmmRemains,
    },
    /// Of use to nobody but an owner that is gone: half loaded, half woken, prepared for
    /// a call that it made, or the making of a template.
    Useless {
        vmm: VmmRemains,
    },
    /// Its processes may stand still, and so may the machine.
    Asleep {
        vmm: VmmRemains,
    },
    Paused {
        vmm: VmmRemains,
    },
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
            Remains::Dormant { vmm: VmmRemains::Alive } => (Self::Dormant, vec![Command::Attach]),
            Remains::Useless { vmm: VmmRemains::Alive } => Self::end(failed(Failure::OwnerGone)),
            Remains::Dormant { vmm: VmmRemains::Gone } | Remains::Useless { vmm: VmmRemains::Gone } => {
                Self::clean_up(failed(Failure::OwnerGone))
            }
            Remains::Asleep { vmm: VmmRemains::Alive } => Self::rouse(),
            // Its owner may have ended before the machine had stopped.
            Remains::Paused { vmm: VmmRemains::Alive } => (Self::Pausing, vec![Command::Pause]),
            Remains::Asleep { vmm: VmmRemains::Gone } | Remains::Paused { vmm: VmmRemains::Gone } => {
                Self::clean_up(failed(Failure::GoneUnseen))
            }
        }
    }

    /// The next phase and what is to be done on the way there, in this order.
    pub(crate) fn on(self, input: Input, times: Times) -> (Self, Vec<Command>) {
        match self {
            Self::Dormant
            | Self::Waking
            | Self::Sleeping { .. }
            | Self::Saving { .. }
            | Self::Keeping
            | Self::Pausing
            | Self::Paused
            | Self::Rousing => self.on_asleep(input, times),
            Self::Created
            | Self::Preparing
            | Self::Spawning
            | Self::Answering
            | Self::Configuring
            | Self::CopyingIn
            | Self::Initialising
            | Self::StartingMain
            | Self::Finding
            | Self::Running
            | Self::Reconnecting
            | Self::StoppingMain
            | Self::Draining { .. }
            | Self::ShuttingDown { .. }
            | Self::Abandoning { .. }
            | Self::Ending { .. }
            | Self::CleaningUp { .. }
            | Self::Stopped { .. } => self.on_awake(input, times),
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
            | Self::Initialising
            | Self::StartingMain
            | Self::Waking
            | Self::Finding => State::Starting,
            Self::Dormant => State::Prepared,
            Self::Sleeping { .. } | Self::Saving { .. } | Self::Keeping | Self::Pausing | Self::Rousing => {
                State::Asleep
            }
            Self::Paused => State::Paused,
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
            | Self::Initialising
            | Self::StartingMain
            | Self::Dormant
            | Self::Waking
            | Self::Finding
            | Self::Running
            | Self::Reconnecting
            | Self::Sleeping { .. }
            | Self::Saving { .. }
            | Self::Keeping
            | Self::Pausing
            | Self::Paused
            | Self::Rousing
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
