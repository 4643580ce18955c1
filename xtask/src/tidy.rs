//! Checks the invariants of ARCHITECTURE.md and CONTRIBUTING.md that no compiler checks.

mod crates;
mod documents;
mod manifest;
mod names;
mod rust;
mod text;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

/// One violation, as `path:line: what is wrong and what to do`. Line 0: the file as a whole.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    line: usize,
    problem: String,
}

impl Finding {
    fn new(path: &str, line: usize, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, problem: problem.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.problem),
            line => write!(f, "{}:{line}: {}", self.path, self.problem),
        }
    }
}

/// A file of the repository that is text: its path from the root, and its content.
struct Source {
    path: String,
    text: String,
}

pub(crate) fn run(root: &Path) -> anyhow::Result<ExitCode> {
    let sources = sources(root)?;
    let mut findings = Vec::new();
    for source in &sources {
        findings.extend(names::check_path(&source.path));
        findings.extend(text::check(source));
        if source.path.ends_with(".rs") {
            findings.extend(rust::check(source)?);
        }
        if documents::is_checked(&source.path) {
            findings.extend(documents::check(source, |path| root.join(path).exists()));
        }
        if source.path == "Cargo.toml" {
            findings.extend(manifest::check(source));
        }
    }
    findings.extend(crates::check(&metadata(root)?));
    for source in &sources {
        if let Some(note) = rust::length_note(source) {
            println!("note: {note}");
        }
    }
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} files, {} findings", sources.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What git tracks or would track.
fn sources(root: &Path) -> anyhow::Result<Vec<Source>> {
    let list = output(root, "git", &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    let paths = list.split('\0').filter(|path| !path.is_empty());
    let mut sources = Vec::new();
    for path in paths {
        let full: PathBuf = root.join(path);
        // A file that was deleted and not yet committed is still listed; what is not UTF-8 is no text.
        if let Ok(text) = fs::read_to_string(&full) {
            sources.push(Source { path: path.to_owned(), text });
        }
    }
    Ok(sources)
}

fn metadata(root: &Path) -> anyhow::Result<serde_json::Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let text = output(root, &cargo, &["metadata", "--no-deps", "--format-version", "1"])?;
    serde_json::from_str(&text).context("reading cargo metadata")
}

fn output(root: &Path, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).current_dir(root).output();
    let output = output.with_context(|| format!("running {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {arguments:?} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}
