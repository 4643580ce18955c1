//! Which VM that is put away a user means. To have it go on the beginning of a digest is enough, as for all that can be done
//! again; to remove it for good it must be said in full.

use imp_runtime::Suspended;

/// Digits that the beginning of a digest has at least.
const SHORTEST: usize = 4;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unknown {
    #[error("no VM {asked:?} is put away; `imp ps --suspended` lists all")]
    Nobody { asked: String },
    #[error(
        "{asked:?} fits more than one VM that is put away: use its whole digest, as `imp ps --suspended -q` shows it"
    )]
    Several { asked: String },
}

/// By its name, or the beginning of its digest. Names win.
pub(super) fn to_wake<'a>(all: &'a [Suspended], asked: &str) -> Result<&'a Suspended, Unknown> {
    find(all, asked, |hex, digits| digits.len() >= SHORTEST && hex.starts_with(digits))
}

/// By its name, or its whole digest: what is meant as the beginning of a VM's id fits none.
pub(super) fn to_discard<'a>(all: &'a [Suspended], asked: &str) -> Result<&'a Suspended, Unknown> {
    find(all, asked, |hex, digits| hex == digits)
}

fn find<'a>(
    all: &'a [Suspended],
    asked: &str,
    fits: impl Fn(&str, &str) -> bool,
) -> Result<&'a Suspended, Unknown> {
    let digits = asked.strip_prefix("sha256:").unwrap_or(asked);
    let named: Vec<_> = all.iter().filter(|one| one.name.as_str() == asked).collect();
    let meant = if named.is_empty() {
        all.iter().filter(|one| fits(&one.snapshot.hex(), digits)).collect()
    } else {
        named
    };
    let shown = || asked.chars().take(100).collect();
    match meant.as_slice() {
        [one] => Ok(one),
        [] => Err(Unknown::Nobody { asked: shown() }),
        _ => Err(Unknown::Several { asked: shown() }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use imp_runtime::Digest;
    use imp_runtime::spec::Memory;

    use super::*;

    fn suspended(name: &str, seed: &[u8]) -> Suspended {
        Suspended {
            snapshot: Digest::of(seed),
            name: name.parse().unwrap(),
            image: "image".into(),
            memory: Memory::from_bytes(256 << 20).unwrap(),
            bytes: 1,
            since: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_vm_is_removed_for_good_only_by_its_name_or_its_whole_digest() {
        let all = [suspended("web", b"1"), suspended("db", b"2")];
        let hex = all[0].snapshot.hex();
        for beginning in [&hex[..4], &hex[..12], &hex[..63], &format!("sha256:{}", &hex[..16])] {
            assert_eq!(to_wake(&all, beginning).unwrap().name.as_str(), "web");
            assert_eq!(to_discard(&all, beginning).unwrap_err(), Unknown::Nobody { asked: beginning.into() });
        }
        for whole in ["web", &hex, &format!("sha256:{hex}")] {
            assert_eq!(to_discard(&all, whole).unwrap().name.as_str(), "web");
        }
        assert!(
            to_wake(&all, &hex[..3]).is_err() && to_wake(&all, "").is_err() && to_discard(&all, "").is_err()
        );
    }

    #[test]
    fn names_win_and_one_that_two_have_means_neither() {
        let first = suspended("web", b"1");
        let named_as_it = suspended(&first.snapshot.hex()[..8], b"2");
        let all = [first, named_as_it, suspended("twin", b"3"), suspended("twin", b"4")];
        let name = all[1].name.as_str();
        assert_eq!(to_wake(&all, name).unwrap().snapshot, all[1].snapshot);
        assert_eq!(to_discard(&all, "twin").unwrap_err(), Unknown::Several { asked: "twin".into() });
    }
}
