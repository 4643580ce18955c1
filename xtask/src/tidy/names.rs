//! Names that say nothing: what is called so lacks a concept.

use super::Finding;

const EMPTY: &[&str] = &["util", "utils", "helper", "helpers", "common", "misc", "manager", "impl", "inner"];

/// Files and folders.
pub(super) fn check_path(path: &str) -> Option<Finding> {
    let words = path.split(['/', '.', '_', '-']);
    empty(words).map(|word| {
        Finding::new(path, 0, format!("`{word}` names no concept: name the file after its subject"))
    })
}

/// A type or module, as `FileManager` or `file_helpers`: the last word says what the thing is.
pub(super) fn check_identifier(path: &str, line: usize, identifier: &str) -> Option<Finding> {
    let words = words(identifier);
    empty(words.last().map(String::as_str)).map(|word| {
        Finding::new(path, line, format!("`{word}` in {identifier} names no concept: say what it is"))
    })
}

fn empty<'a>(words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    words.into_iter().find(|word| EMPTY.contains(word))
}

/// Lowercase words of a name in camel or snake case.
fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for letter in identifier.chars() {
        if letter == '_' || letter.is_uppercase() {
            words.push(String::new());
        }
        if let (Some(word), true) = (words.last_mut(), letter != '_') {
            word.extend(letter.to_lowercase());
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_a_concept_are_found() {
        for path in ["lib/storage/src/utils.rs", "lib/common/src/lib.rs", "bin/imp/src/vm_manager.rs"] {
            assert!(check_path(path).is_some(), "{path}");
        }
        for name in ["StoreInner", "file_helpers", "Manager"] {
            assert!(check_identifier("x.rs", 1, name).is_some(), "{name}");
        }
    }

    #[test]
    fn words_that_only_contain_such_a_name_are_fine() {
        assert!(check_path("lib/storage/src/implementation.rs").is_none());
        assert!(check_identifier("x.rs", 1, "Committed").is_none());
        assert!(check_identifier("x.rs", 1, "HelperAnswer").is_none());
    }
}
