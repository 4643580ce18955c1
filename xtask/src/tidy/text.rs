//! What no file says: hosts of package registries, which each machine configures for itself, and paths of one machine.

use super::{Finding, Source};

/// In two halves, so that this file passes its own check.
const REGISTRIES: &[(&str, &str)] = &[
    ("crates", ".io"),
    ("pypi", ".org"),
    ("pythonhosted", ".org"),
    ("npmjs", ".org"),
    ("npmjs", ".com"),
    ("deb.debian", ".org"),
    ("security.debian", ".org"),
    ("proxy.golang", ".org"),
    ("repo.maven", ".apache"),
];

/// Folders in which one person or one machine works.
const MACHINES: &[(&str, &str)] =
    &[("/ho", "me/"), ("/ro", "ot/"), ("/Us", "ers/"), ("/wo", "rk/"), ("/tmp", "/w/")];
/// Those of them that every machine and guest has: tests make up paths in them.
const EVERYWHERE: &[&str] = &["/ho", "/ro"];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    // Cargo writes its registry's name into every entry.
    if source.path == "Cargo.lock" {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (number, line) in source.text.lines().enumerate() {
        for (name, end) in REGISTRIES {
            let host = format!("{name}{end}");
            if line.contains(&host) {
                let problem =
                    format!("names the package registry {host}: use the machine's own configuration");
                findings.push(Finding::new(&source.path, number + 1, problem));
            }
        }
        let rust = source.path.ends_with(".rs");
        for (start, end) in MACHINES.iter().filter(|(start, _)| !rust || !EVERYWHERE.contains(start)) {
            let folder = format!("{start}{end}");
            if line.match_indices(&folder).any(|(at, _)| begins_a_path(line, at)) {
                let problem = format!("names a path below {folder}, which is there on one machine only");
                findings.push(Finding::new(&source.path, number + 1, problem));
            }
        }
    }
    findings
}

/// Whether the slash at `at` is the first of a path: `"/x`, `=/x`, but not `a/x`, `$A/x` or `}/x`.
fn begins_a_path(line: &str, at: usize) -> bool {
    let before = line.get(..at).and_then(|before| before.chars().next_back());
    !before.is_some_and(|letter| letter.is_alphanumeric() || ".-_~}/)*".contains(letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let source = Source { path: "README.md".into(), text: text.into() };
        check(&source).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn hosts_of_package_registries_are_found() {
        assert_eq!(lines(&format!("nothing\nsee {}{}\n", "https://crates", ".io/x")), [2]);
        assert!(lines("docker.io/library/debian").is_empty());
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        assert_eq!(lines(&format!("cd {}{}\n", "/ho", "me/me/imp")), [1]);
        assert!(lines(&format!("cd $HOME{}{}\n", "/wo", "rk/imp")).is_empty());
    }
}
