//! What clients are told that ask for what cannot be done.

use imp_protocol::causes;
use tonic::Status;

use crate::under_way::NotDone;

/// Longest message of a refusal: it travels in a header.
const LONGEST: usize = 2048;

impl From<NotDone> for Status {
    fn from(error: NotDone) -> Self {
        match error {
            NotDone::Ending => Self::cancelled(error.to_string()),
            NotDone::Ended => Self::internal(error.to_string()),
        }
    }
}

/// Of a request that makes no sense.
pub(crate) fn invalid(error: &(dyn std::error::Error + 'static)) -> Status {
    Status::invalid_argument(chain(error))
}

/// Of an error of the engine.
pub(crate) fn refusal(error: &imp_runtime::Error) -> Status {
    use imp_runtime::Error;
    let message = chain(error);
    match error {
        Error::NoSuchVm { .. } | Error::Ambiguous { .. } => Status::not_found(message),
        Error::NameTaken { .. } | Error::NameTakenMeanwhile { .. } => Status::already_exists(message),
        Error::Refused(_) | Error::NoUser => Status::resource_exhausted(message),
        Error::Port(_) => Status::failed_precondition(message),
        Error::NotCreated { .. }
        | Error::NotReachable { .. }
        | Error::NotRemoved { .. }
        | Error::NotPrepared { .. }
        | Error::NotActivated { .. }
        | Error::NotSaved { .. }
        | Error::NotPaused { .. }
        | Error::NotResumed { .. }
        | Error::NotSuspended { .. }
        | Error::HoldsSecrets { .. }
        | Error::SecretsOnDisk { .. }
        | Error::NoSnapshots { .. }
        | Error::NoVmm { .. }
        | Error::NotWhole { .. }
        | Error::NotATemplate { .. }
        | Error::Contradiction { .. }
        | Error::NoBase { .. }
        | Error::Snapshots(_)
        | Error::NetworkRefused(_)
        | Error::NoNetworkLimits { .. }
        | Error::NoBalloons { .. }
        | Error::NotReclaimed { .. }
        | Error::Bridge(_)
        | Error::Kernel(_)
        | Error::Driver(_) => Status::failed_precondition(message),
        // Of the machine: files that cannot be read or written, processes that cannot be looked at.
        Error::Pins(_)
        | Error::Ledger(_)
        | Error::Logs(_)
        | Error::Owned { .. }
        | Error::Open { .. }
        | Error::Store(_)
        | Error::Configuration { .. }
        | Error::NotDescribed(_)
        | Error::Process(_)
        | Error::Ended => Status::internal(message),
    }
}

/// An error with its causes, short enough for a header.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = causes::chain(error);
    if text.len() > LONGEST {
        let end = text.floor_char_boundary(LONGEST);
        text.truncate(end);
        text.push('…');
    }
    text
}
