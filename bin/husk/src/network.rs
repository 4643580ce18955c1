//! What is wished of a machine's network so that it reaches no more than it may: pure.

use imp_runtime::spec::{BridgeWishes, Egress, NetworkMode, Otherwise};

use crate::protocol::Reach;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error(
        "machines of this snapshot have a network that nothing filters: say \"egress\":\"allow\" if they may reach everything"
    )]
    Unfiltered,
    #[error("machines of this snapshot have a network, and block_network allows none")]
    HasNetwork,
    #[error(
        "the machine was prepared to reach something else than this request says: give both the same egress"
    )]
    PreparedOtherwise,
}

/// For a machine that is to be made of a snapshot whose machines have this network.
pub(crate) fn wishes(mode: NetworkMode, reach: Reach) -> Result<BridgeWishes, Refused> {
    match (mode, reach) {
        (NetworkMode::None, Reach::NoNetwork | Reach::Nothing | Reach::Everything)
        | (NetworkMode::User | NetworkMode::Bridge, Reach::Everything) => Ok(BridgeWishes::default()),
        (NetworkMode::Bridge, Reach::Nothing) => {
            Ok(BridgeWishes { egress: Some(nothing()), ..BridgeWishes::default() })
        }
        (NetworkMode::User, Reach::Nothing) => Err(Refused::Unfiltered),
        (NetworkMode::User | NetworkMode::Bridge, Reach::NoNetwork) => Err(Refused::HasNetwork),
    }
}

/// Whether a machine that is there keeps what an activation says.
pub(crate) fn keeps(mode: NetworkMode, egress: Option<&Egress>, reach: Reach) -> Result<(), Refused> {
    let wished = wishes(mode, reach)?;
    if mode == NetworkMode::None || wished.egress.as_ref() == egress {
        Ok(())
    } else {
        Err(Refused::PreparedOtherwise)
    }
}

fn nothing() -> Egress {
    Egress { otherwise: Otherwise::Refuse, refuse: Vec::new(), allow: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_reaches_no_more_than_was_asked_for_or_is_not_made() {
        use NetworkMode as M;
        use Reach as R;
        let refuses = |wishes: BridgeWishes| wishes.egress.is_some();
        for (mode, reach, expected) in [
            (M::None, R::NoNetwork, Ok(false)),
            (M::None, R::Nothing, Ok(false)),
            (M::None, R::Everything, Ok(false)),
            (M::User, R::NoNetwork, Err(Refused::HasNetwork)),
            (M::User, R::Nothing, Err(Refused::Unfiltered)),
            (M::User, R::Everything, Ok(false)),
            (M::Bridge, R::NoNetwork, Err(Refused::HasNetwork)),
            (M::Bridge, R::Nothing, Ok(true)),
            (M::Bridge, R::Everything, Ok(false)),
        ] {
            assert_eq!(wishes(mode, reach).map(refuses), expected, "{mode:?} {reach:?}");
        }
    }

    #[test]
    fn an_activation_must_say_what_the_machine_was_prepared_for() {
        use NetworkMode as M;
        use Reach as R;
        let none = nothing();
        for (mode, egress, reach, expected) in [
            (M::None, None, R::Nothing, Ok(())),
            (M::Bridge, Some(&none), R::Nothing, Ok(())),
            (M::Bridge, None, R::Everything, Ok(())),
            (M::Bridge, None, R::Nothing, Err(Refused::PreparedOtherwise)),
            (M::Bridge, Some(&none), R::Everything, Err(Refused::PreparedOtherwise)),
            (M::User, None, R::Everything, Ok(())),
            (M::User, None, R::Nothing, Err(Refused::Unfiltered)),
        ] {
            assert_eq!(keeps(mode, egress, reach), expected, "{mode:?} {reach:?}");
        }
    }
}
