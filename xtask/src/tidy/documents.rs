//! Every path of this repository that a document names exists.
//!
//! A path is what stands in back quotes or is the target of a link, and the first word of a line in a block of plain
//! text, if it begins like a path from the root. `{a,b}` stands for each.

use super::{Finding, Source};

/// Folders at the root that documents speak of.
const FOLDERS: &[&str] = &[
    "bin",
    "lib",
    "tests",
    "xtask",
    "docs",
    "examples",
    "bench",
    "contracts",
    "charts",
    "images",
    "sdk",
    ".ci",
];

pub(super) fn is_checked(path: &str) -> bool {
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].contains(&path)
        || (path.starts_with("docs/") && path.ends_with(".md"))
}

pub(super) fn check(document: &Source, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut block: Option<&str> = None;
    for (number, line) in document.text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            block = if block.is_some() { None } else { Some(language) };
            continue;
        }
        let mut paths = Vec::new();
        match block {
            None => {
                paths.extend(
                    line.split('`').skip(1).step_by(2).filter(|span| is_path(span)).map(str::to_owned),
                );
                paths.extend(link_targets(line).map(|target| resolve(&document.path, target)));
            }
            Some("" | "text") => {
                paths.extend(line.split_whitespace().next().filter(|word| is_path(word)).map(str::to_owned));
            }
            Some(_) => {}
        }
        for path in paths.iter().flat_map(|path| expand(path)) {
            if !exists(&path) {
                findings.push(Finding::new(&document.path, number + 1, format!("{path} does not exist")));
            }
        }
    }
    findings
}

fn is_path(word: &str) -> bool {
    let known = |folder: &str| FOLDERS.contains(&folder);
    let root_file = !word.contains('/') && (word.ends_with(".md") || word.ends_with(".toml"));
    let below = word.split_once('/').is_some_and(|(folder, _)| known(folder));
    (root_file || below) && !word.contains([' ', '<', '$', '*', '…', '('])
}

/// Targets of `[text](target)` that are files.
fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split_once(')')?.0;
        let path = target.split_once('#').map_or(target, |(path, _)| path);
        (!path.is_empty() && !path.contains("://")).then_some(path)
    })
}

/// A link's target as a path from the root.
fn resolve(document: &str, target: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// `a/{b,c}.rs` is `a/b.rs` and `a/c.rs`.
fn expand(path: &str) -> Vec<String> {
    let parts = path.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    match parts {
        Some((before, (choices, after))) => {
            choices.split(',').flat_map(|choice| expand(&format!("{before}{choice}{after}"))).collect()
        }
        None => vec![path.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(text: &str) -> Vec<String> {
        let document = Source { path: "docs/cli.md".into(), text: text.into() };
        let there = ["lib/sys", "lib/sys/src/a.rs", "README.md", "docs/images.md"];
        check(&document, |path| there.contains(&path)).into_iter().map(|finding| finding.problem).collect()
    }

    #[test]
    fn a_path_that_does_not_exist_is_found() {
        assert_eq!(missing("in `lib/sys/src/gone.rs`"), ["lib/sys/src/gone.rs does not exist"]);
        assert_eq!(missing("in `lib/sys/src/{a,b}.rs`"), ["lib/sys/src/b.rs does not exist"]);
        assert_eq!(missing("[guide](guest.md#top)"), ["docs/guest.md does not exist"]);
        assert_eq!(missing("```text\nlib/gone/   what it is\n```\n"), ["lib/gone/ does not exist"]);
    }

    #[test]
    fn what_is_no_path_of_the_repository_is_left_alone() {
        let text = "`imp run`, `/etc/hosts`, `lib/sys`, `a/b`, [x](https://example.com/lib/x), [up](../README.md), \
                    [next](images.md)\n```console\n$ ls\nlib/anything\n```\n";
        assert!(missing(text).is_empty(), "{:?}", missing(text));
    }
}
