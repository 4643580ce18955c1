//! Why a husk does not do what it is asked for.

use std::io;
use std::path::PathBuf;

use imp_protocol::causes::chain;
use imp_runtime::status::Outcome;
use imp_runtime::{Error, NotActivated, VmId};

use crate::protocol::{Answer, Code, Invalid, TooLong};
use crate::{lifecycle, network};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    TooLong(#[from] TooLong),
    #[error(transparent)]
    Lifecycle(#[from] lifecycle::Refused),
    #[error(transparent)]
    Network(#[from] network::Refused),
    #[error("it was not done within {} ms", .0.as_millis())]
    Late(std::time::Duration),
    #[error("the request did not come within {} s of its op", .0.as_secs())]
    Silent(std::time::Duration),
    #[error("this husk's machine is {is}, not {asked}")]
    OtherMachine { is: String, asked: String },
    #[error("vm_id {asked} is too long for a machine: at most 63 letters")]
    MachineName { asked: String },
    #[error("{} is not the directory of a snapshot in this husk's store: it is named by its digest in {}", directory.display(), store.display())]
    NotASnapshot { directory: PathBuf, store: PathBuf },
    #[error("the snapshot's digest is {}, and {} was expected", is.hex(), expected.hex())]
    OtherDigest { is: imp_runtime::Digest, expected: imp_runtime::Digest },
    #[error("the snapshot is not that of a fork, so it needs an expected_digest")]
    NotAFork,
    #[error("the snapshot is of a suspended VM, of which there can be only one: `imp resume` has it go on")]
    Suspended,
    #[error("the snapshot cannot be used")]
    Snapshot(#[source] Box<Error>),
    #[error("the machine was not prepared")]
    NotPrepared(#[source] Box<Error>),
    #[error("the machine did not come up: {}", how(.0))]
    NotUp(Box<Outcome>),
    #[error("the machine was ended: it did not confirm that it is one of its own: {}", how(.0))]
    NotConfirmed(Box<Outcome>),
    #[error("the machine was not activated")]
    NotActivated(#[source] Box<Error>),
    #[error("no snapshot was made of the machine, which goes on")]
    NotForked(#[source] Box<Error>),
    #[error("there is a fork {fork} already: remove it, or choose another fork_id")]
    ForkExists { fork: String },
    #[error("{} is not in the directory of forks, {}", path.display(), forks.display())]
    OutsideForks { path: PathBuf, forks: PathBuf },
    #[error("{} is there already", path.display())]
    InTheWay { path: PathBuf },
    #[error("there is no fork {fork}")]
    NoFork { fork: String },
    #[error("cannot use {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("VM {id} is gone")]
    Gone { id: VmId },
    #[error("the user {uid} has no business here")]
    Stranger { uid: u32 },
    #[error("too many connections at once: try again")]
    TooMany,
    #[error("the husk failed at it")]
    Broken,
}

impl Refusal {
    pub(crate) fn of_preparation(error: Error) -> Self {
        match error {
            Error::NotPrepared { outcome } => Self::NotUp(Box::new(outcome)),
            error => Self::NotPrepared(Box::new(error)),
        }
    }

    pub(crate) fn of_activation(error: Error) -> Self {
        match error {
            Error::NotActivated { source: NotActivated::Ended { outcome }, .. } => {
                Self::NotConfirmed(Box::new(outcome))
            }
            error => Self::NotActivated(Box::new(error)),
        }
    }

    pub(crate) fn answer(&self) -> Answer {
        Answer::refusal(self.code(), chain(self))
    }

    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid(Invalid::UnknownOp) => Code::UnknownOp,
            Self::Invalid(Invalid::Unsupported { .. }) => Code::Unsupported,
            Self::Invalid(
                Invalid::NotJson { .. }
                | Invalid::NotARequest { .. }
                | Invalid::Unfinished
                | Invalid::Field { .. }
                | Invalid::Variables { .. },
            ) => Code::Malformed,
            Self::TooLong(TooLong) => Code::TooLong,
            Self::Lifecycle(refused) => match refused {
                lifecycle::Refused::NotPrepared => Code::NotPrepared,
                lifecycle::Refused::AlreadyPrepared => Code::AlreadyPrepared,
                lifecycle::Refused::AlreadyActive => Code::AlreadyActive,
                lifecycle::Refused::OtherSnapshot { .. } => Code::OtherSnapshot,
                lifecycle::Refused::NotActive => Code::NotActive,
                lifecycle::Refused::Busy(_) => Code::Busy,
                lifecycle::Refused::Ended => Code::Ended,
                lifecycle::Refused::Ending => Code::Ending,
            },
            Self::Network(_) => Code::Network,
            Self::Late(_) | Self::Silent(_) => Code::Deadline,
            Self::OtherMachine { .. } => Code::OtherMachine,
            Self::MachineName { .. } | Self::OutsideForks { .. } => Code::Malformed,
            Self::NotASnapshot { .. } => Code::NoSnapshot,
            Self::OtherDigest { .. } | Self::NotAFork | Self::Suspended | Self::Snapshot(_) => {
                Code::SnapshotRefused
            }
            Self::NotConfirmed(_) => Code::NotConfirmed,
            Self::NotForked(error) => match error.as_ref() {
                Error::HoldsSecrets { .. } => Code::HoldsSecrets,
                _ => Code::Failed,
            },
            Self::ForkExists { .. } | Self::InTheWay { .. } => Code::ForkExists,
            Self::NoFork { .. } => Code::NoFork,
            Self::Gone { .. } => Code::Ended,
            Self::Stranger { .. } => Code::Stranger,
            Self::TooMany => Code::TooMany,
            Self::NotPrepared(_)
            | Self::NotUp(_)
            | Self::NotActivated(_)
            | Self::File { .. }
            | Self::Broken => Code::Failed,
        }
    }
}

/// How a machine ended, without what its console said: that is the guest's.
pub(crate) fn how(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed { failure, .. } => failure.to_string(),
        Outcome::Exited { .. }
        | Outcome::Signalled { .. }
        | Outcome::NotStarted { .. }
        | Outcome::Killed
        | Outcome::PoweredOff => format!("{outcome:?}"),
    }
}
