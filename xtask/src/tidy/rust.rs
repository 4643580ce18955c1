//! Rules for Rust files, on tokens: what stands in comments and strings is not code.

use anyhow::anyhow;
use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};

use super::{Finding, Source, names};

/// The only place for `unsafe`.
const UNSAFE: &str = "lib/sys/";
/// Files that decide and do nothing else.
const PURE: &[&str] =
    &["plan.rs", "objects.rs", "lifecycle.rs", "placement.rs", "addresses.rs", "admission.rs"];
/// What a decision may not touch: waiting, clocks, chance, sockets, the system.
const IMPURE: &[&str] = &[
    "async",
    "await",
    "tokio",
    "Instant",
    "SystemTime",
    "rand",
    "fastrand",
    "getrandom",
    "rustix",
    "TcpListener",
    "TcpStream",
    "UdpSocket",
];
/// The same, as modules of `std`. (Of `std::net` the addresses are fine.)
const IMPURE_STD: &[&str] = &["fs", "process", "env", "thread", "time"];
/// `std::time` has one thing that is only a number.
const PURE_TIME: &str = "Duration";

const MOST_LINES: usize = 500;
const GOOD_LINES: usize = 400;

pub(super) fn check(source: &Source) -> anyhow::Result<Vec<Finding>> {
    let tokens: TokenStream =
        source.text.parse().map_err(|error| anyhow!("{} is not Rust: {error}", source.path))?;
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut findings = Vec::new();
    if source.text.lines().count() > MOST_LINES {
        let problem = format!("more than {MOST_LINES} lines: split it by subject");
        findings.push(Finding::new(&source.path, 0, problem));
    }
    check_tokens(source, &tokens, &mut findings);
    if PURE.contains(&file_name(&source.path)) {
        check_pure(&source.path, &without_tests(&tokens), &mut findings);
    }
    Ok(findings)
}

/// A file that is allowed but longer than files should be.
pub(super) fn length_note(source: &Source) -> Option<String> {
    let lines = source.text.lines().count();
    let long = source.path.ends_with(".rs") && lines > GOOD_LINES && lines <= MOST_LINES;
    long.then(|| format!("{} has {lines} lines; {GOOD_LINES} is the aim", source.path))
}

fn file_name(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

fn check_tokens(source: &Source, tokens: &[TokenTree], findings: &mut Vec<Finding>) {
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(ident) => findings.extend(check_ident(&source.path, ident, tokens.get(at + 1))),
            TokenTree::Group(group) => {
                if at.checked_sub(1).is_some_and(|before| is_punct(tokens.get(before), '#')) {
                    findings.extend(check_attribute(source, group, tokens.get(at..).unwrap_or_default()));
                }
                let within: Vec<TokenTree> = group.stream().into_iter().collect();
                check_tokens(source, &within, findings);
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn check_ident(path: &str, ident: &Ident, next: Option<&TokenTree>) -> Option<Finding> {
    let line = ident.span().start().line;
    match (ident.to_string().as_str(), next) {
        ("unsafe", _) if !path.starts_with(UNSAFE) => {
            Some(Finding::new(path, line, "`unsafe` belongs in lib/sys, behind a safe function"))
        }
        ("todo" | "dbg" | "unimplemented", next) if is_punct(next, '!') => {
            Some(Finding::new(path, line, "unfinished work is not kept: finish it or remove it"))
        }
        ("struct" | "enum" | "trait" | "mod" | "type", Some(TokenTree::Ident(name))) => {
            names::check_identifier(path, line, &name.to_string())
        }
        _ => None,
    }
}

/// A test that is ignored and that no other test starts by its name, in a process of its own.
fn check_attribute(source: &Source, attribute: &Group, after: &[TokenTree]) -> Option<Finding> {
    let ident = first_ident(attribute).filter(|ident| ident == "ignore")?;
    let mut names =
        after.iter().skip_while(|token| !matches!(token, TokenTree::Ident(word) if *word == "fn")).skip(1);
    let is_started = names.next().is_some_and(|name| source.text.matches(&name.to_string()).count() > 1);
    let problem = "a test that nobody runs proves nothing: repair it or remove it";
    (!is_started).then(|| Finding::new(&source.path, ident.span().start().line, problem))
}

fn check_pure(path: &str, tokens: &[TokenTree], findings: &mut Vec<Finding>) {
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(ident) => {
                let text = ident.to_string();
                let of_std = text == "std" && is_punct(tokens.get(at + 1), ':');
                let impure = if IMPURE.contains(&text.as_str()) {
                    Some(text)
                } else if of_std {
                    tokens.get(at + 3..).and_then(impure_std)
                } else {
                    None
                };
                if let Some(what) = impure {
                    let problem =
                        format!("`{what}` in a file of decisions: give it what it needs as an argument");
                    findings.push(Finding::new(path, ident.span().start().line, problem));
                }
            }
            TokenTree::Group(group) => {
                let within: Vec<TokenTree> = group.stream().into_iter().collect();
                check_pure(path, &within, findings);
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// The impure module at the start of what follows `std::`, be it a name or a list of names.
fn impure_std(after: &[TokenTree]) -> Option<String> {
    match after.first()? {
        TokenTree::Ident(module) => {
            let module = module.to_string();
            let only_a_number = module == "time"
                && matches!(after.get(3), Some(TokenTree::Ident(name)) if *name == PURE_TIME);
            (IMPURE_STD.contains(&module.as_str()) && !only_a_number).then(|| format!("std::{module}"))
        }
        TokenTree::Group(list) => {
            let list: Vec<TokenTree> = list.stream().into_iter().collect();
            let starts = std::iter::once(0).chain(
                list.iter().enumerate().filter(|(_, token)| is_punct(Some(token), ',')).map(|(at, _)| at + 1),
            );
            starts.filter_map(|start| list.get(start..)).find_map(impure_std)
        }
        TokenTree::Punct(_) | TokenTree::Literal(_) => None,
    }
}

/// The tokens without the items under `#[cfg(test)]`, each of which ends with its first block.
fn without_tests(tokens: &[TokenTree]) -> Vec<TokenTree> {
    let mut kept = Vec::new();
    let mut skipping = false;
    for token in tokens {
        match token {
            TokenTree::Group(group) if skipping => skipping = group.delimiter() != Delimiter::Brace,
            TokenTree::Group(group) if group.stream().to_string().replace(' ', "") == "cfg(test)" => {
                skipping = true
            }
            token if !skipping => kept.push(token.clone()),
            _ => {}
        }
    }
    kept
}

fn is_punct(token: Option<&TokenTree>, punct: char) -> bool {
    matches!(token, Some(TokenTree::Punct(found)) if found.as_char() == punct)
}

fn first_ident(group: &Group) -> Option<Ident> {
    match group.stream().into_iter().next()? {
        TokenTree::Ident(ident) => Some(ident),
        TokenTree::Group(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        let source = Source { path: path.into(), text: text.into() };
        check(&source).unwrap().into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn unsafe_is_found_outside_of_sys_and_not_in_comments() {
        let text = "// unsafe\nfn a() { let text = \"unsafe\"; }\nfn b() { m!(unsafe { c() }) }\n";
        assert_eq!(lines("lib/runtime/src/a.rs", text), [3]);
        assert!(lines("lib/sys/src/a.rs", text).is_empty());
    }

    #[test]
    fn unfinished_work_is_found() {
        let text = "#[test]\n#[ignore = \"slow\"]\nfn a() { todo!() }\nfn b() { dbg!(1); let todo = 1; }\n";
        assert_eq!(lines("a.rs", text), [2, 3, 4]);
        let part = "#[test]\nfn a() { start(\"tests::the_part\"); }\n#[test]\n#[ignore = \"started by a\"]\nfn the_part() {}\n";
        assert!(lines("a.rs", part).is_empty());
    }

    #[test]
    fn decisions_that_do_something_are_found() {
        let text = "use std::time::Duration;\nuse std::{collections::BTreeMap, fs};\nasync fn a() {}\n\
                    fn b() { std::env::var(\"A\"); }\nfn c() -> std::time::Instant { d(tokio::spawn(x)) }\n";
        assert_eq!(lines("lib/runtime/src/lifecycle.rs", text), [2, 3, 4, 5, 5, 5]);
        assert!(lines("lib/runtime/src/vm.rs", text).is_empty());
    }

    #[test]
    fn tests_of_decisions_may_do_as_they_like() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests { use std::fs; }\nuse std::fs;\n";
        assert_eq!(lines("plan.rs", text), [4]);
    }

    #[test]
    fn types_and_modules_without_a_concept_are_found() {
        assert_eq!(
            lines("a.rs", "struct Store;\nstruct StoreInner;\nmod helpers {}\nfn inner() {}\n"),
            [2, 3]
        );
    }

    #[test]
    fn a_file_that_is_too_long_is_refused_and_a_long_one_noted() {
        let source = |lines: usize| Source { path: "a.rs".into(), text: "// x\n".repeat(lines) };
        assert_eq!(check(&source(501)).unwrap().len(), 1);
        assert!(check(&source(500)).unwrap().is_empty());
        assert!(length_note(&source(401)).is_some() && length_note(&source(400)).is_none());
    }
}
