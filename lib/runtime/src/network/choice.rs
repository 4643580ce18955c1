//! Which network a VM gets: pure.

use crate::spec::{BridgeWishes, NetworkMode};
use crate::vmm::drivers::User;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error(
        "{driver} has no network of the kind `{mode}`; it has {}: choose one of these, or another driver",
        names(has)
    )]
    NotByDriver { driver: String, mode: &'static str, has: Vec<NetworkMode> },
    #[error(
        "what a VM may reach and IPv6 are for bridge networks, and this VM is to have `{mode}`: use --network bridge, which needs root"
    )]
    NeedsBridge { mode: &'static str },
    #[error("a bridge network needs root: run this as root, or use --network {instead}")]
    NeedsRoot { instead: &'static str },
}

/// What is asked for, in words or by wishes that nothing else can grant.
pub(crate) fn asked(mode: Option<NetworkMode>, wishes: &BridgeWishes) -> Option<NetworkMode> {
    mode.or_else(|| (!wishes.is_none()).then_some(NetworkMode::Bridge))
}

/// `has`: the networks that the driver can attach to, the best first; none is always possible.
pub(crate) fn choose(
    asked: Option<NetworkMode>,
    wishes: &BridgeWishes,
    driver: &str,
    has: &[NetworkMode],
    user: User,
) -> Result<NetworkMode, Refused> {
    let needs_root = || {
        let instead = if has.contains(&NetworkMode::User) { "user" } else { "none" };
        Refused::NeedsRoot { instead }
    };
    let possible = |mode: NetworkMode| match mode {
        NetworkMode::None => true,
        NetworkMode::User => has.contains(&mode),
        NetworkMode::Bridge => has.contains(&mode) && user == User::Root,
    };
    let mode = match self::asked(asked, wishes) {
        Some(mode) => mode,
        None => *has.iter().find(|mode| possible(**mode)).ok_or_else(needs_root)?,
    };
    if mode != NetworkMode::Bridge && !wishes.is_none() {
        return Err(Refused::NeedsBridge { mode: name(mode) });
    }
    if mode != NetworkMode::None && !has.contains(&mode) {
        let (driver, has) = (driver.to_owned(), has.to_vec());
        return Err(Refused::NotByDriver { driver, mode: name(mode), has });
    }
    if !possible(mode) {
        return Err(needs_root());
    }
    Ok(mode)
}

fn name(mode: NetworkMode) -> &'static str {
    match mode {
        NetworkMode::None => "none",
        NetworkMode::User => "user",
        NetworkMode::Bridge => "bridge",
    }
}

fn names(modes: &[NetworkMode]) -> String {
    let none = std::iter::once(NetworkMode::None);
    modes.iter().copied().chain(none).map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Egress, IpVersions};

    const QEMU: &[NetworkMode] = &[NetworkMode::User, NetworkMode::Bridge];
    const FIRECRACKER: &[NetworkMode] = &[NetworkMode::Bridge];

    fn chosen(asked: Option<NetworkMode>, has: &[NetworkMode], user: User) -> Option<NetworkMode> {
        choose(asked, &BridgeWishes::default(), "vmm", has, user).ok()
    }

    #[test]
    fn the_default_is_the_drivers_best_that_is_possible_and_never_silently_nothing() {
        use crate::vmm::drivers::User::{Ordinary, Root};
        use NetworkMode::{Bridge, None as Nothing, User as Passt};
        for (asked, has, user, expected) in [
            (None, QEMU, Ordinary, Some(Passt)),
            (None, QEMU, Root, Some(Passt)),
            (None, FIRECRACKER, Root, Some(Bridge)),
            (None, FIRECRACKER, Ordinary, None),
            (Some(Bridge), QEMU, Root, Some(Bridge)),
            (Some(Bridge), QEMU, Ordinary, None),
            (Some(Passt), FIRECRACKER, Root, None),
            (Some(Nothing), FIRECRACKER, Ordinary, Some(Nothing)),
        ] {
            assert_eq!(chosen(asked, has, user), expected, "{asked:?} {has:?} {user:?}");
        }
    }

    #[test]
    fn a_policy_means_a_bridge_and_goes_with_nothing_else() {
        let closed = BridgeWishes { egress: Some(Egress::only(Vec::new())), ..BridgeWishes::default() };
        let ipv6 = BridgeWishes { versions: IpVersions::Both, ..BridgeWishes::default() };
        for wishes in [closed, ipv6] {
            let choose = |asked, user| choose(asked, &wishes, "vmm", QEMU, user);
            assert_eq!(choose(None, User::Root), Ok(NetworkMode::Bridge));
            assert!(matches!(choose(None, User::Ordinary), Err(Refused::NeedsRoot { .. })));
            for mode in [NetworkMode::User, NetworkMode::None] {
                assert!(matches!(choose(Some(mode), User::Root), Err(Refused::NeedsBridge { .. })));
            }
        }
    }
}
