//! Which VMs a user may have meant by a name that fits none, or more than one.

/// Most candidates that are named.
const MOST: usize = 5;

/// A VM by its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) id: String,
    pub(crate) name: String,
}

/// What to say of a name that fits no VM.
pub(crate) fn unknown(asked: &str, vms: &[Named]) -> String {
    let mut close: Vec<(usize, &str)> = vms
        .iter()
        .map(|vm| (distance(asked, &vm.name), vm.name.as_str()))
        .filter(|(distance, name)| *distance <= name.len().max(asked.len()) / 3 || name.contains(asked))
        .collect();
    close.sort_unstable();
    let names: Vec<String> = close.iter().take(MOST).map(|(_, name)| format!("{name:?}")).collect();
    match names.as_slice() {
        [] => format!("no VM is called {asked:?}; `imp ps -a` lists all"),
        names => {
            format!("no VM is called {asked:?}; did you mean {}? `imp ps -a` lists all", names.join(" or "))
        }
    }
}

/// What to say of the beginning of an id that several VMs share.
pub(crate) fn ambiguous(asked: &str, vms: &[Named]) -> String {
    let fitting: Vec<String> = vms
        .iter()
        .filter(|vm| vm.id.starts_with(asked))
        .take(MOST)
        .map(|vm| format!("{} ({})", vm.id, vm.name))
        .collect();
    format!("{asked:?} fits more than one VM: {}; use a name or more digits of the id", fitting.join(", "))
}

/// Levenshtein's: letters to add, drop or change.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut diagonal = line;
        let mut left = line + 1;
        let mut next = vec![left];
        for (theirs, above) in other.iter().zip(row.iter().skip(1)) {
            left = (diagonal + usize::from(letter != *theirs)).min(left + 1).min(above + 1);
            diagonal = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vms() -> Vec<Named> {
        [("aaaa1", "web-server"), ("aaab2", "database"), ("b3", "web-cache")]
            .map(|(id, name)| Named { id: id.into(), name: name.into() })
            .into()
    }

    #[test]
    fn a_misspelt_name_brings_the_right_one() {
        let text = unknown("web-sever", &vms());
        assert!(text.contains("\"web-server\"") && !text.contains("database"), "{text}");
        let text = unknown("web", &vms());
        assert!(text.contains("\"web-server\"") && text.contains("\"web-cache\""), "{text}");
    }

    #[test]
    fn a_name_like_none_says_how_to_list_them() {
        assert_eq!(unknown("x", &vms()), "no VM is called \"x\"; `imp ps -a` lists all");
        assert_eq!(unknown("x", &[]), "no VM is called \"x\"; `imp ps -a` lists all");
    }

    #[test]
    fn an_ambiguous_beginning_lists_what_it_fits() {
        let text = ambiguous("aaa", &vms());
        assert!(
            text.contains("aaaa1 (web-server), aaab2 (database)") && !text.contains("web-cache"),
            "{text}"
        );
    }

    #[test]
    fn distances_are_symmetric_and_count_edits() {
        for (one, other, expected) in
            [("", "", 0), ("", "abc", 3), ("abc", "abd", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(one, other), expected);
            assert_eq!(distance(other, one), expected);
        }
    }
}
