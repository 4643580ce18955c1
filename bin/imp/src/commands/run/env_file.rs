//! Files with variables, as docker reads them.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read the variables in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path}, line {line}: {text:?} is not NAME=VALUE or NAME")]
    Line { path: PathBuf, line: usize, text: String },
}

pub(crate) fn read(path: &Path) -> Result<Vec<OsString>, Error> {
    let text =
        std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    parse(&text).map_err(|(line, text)| Error::Line { path: path.to_owned(), line, text })
}

/// Blank lines and those that begin with # say nothing; values are literal, quotes and all.
fn parse(text: &str) -> Result<Vec<OsString>, (usize, String)> {
    let mut variables = Vec::new();
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let line = line.trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let name = line.split('=').next().unwrap_or_default();
        if name.is_empty() || name.contains(char::is_whitespace) || line.contains('\0') {
            return Err((number + 1, line.to_owned()));
        }
        variables.push(line.into());
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_literal_and_comments_say_nothing() {
        let text = "# c\n\n  A=1 # not a comment\nB=\"q\"\nFROM_HERE\nC=\r\n";
        assert_eq!(parse(text).unwrap(), ["A=1 # not a comment", "B=\"q\"", "FROM_HERE", "C="]);
    }

    #[test]
    fn a_line_that_is_no_variable_is_named() {
        assert_eq!(parse("A=1\nB C=2"), Err((2, "B C=2".to_owned())));
        assert_eq!(parse("=x"), Err((1, "=x".to_owned())));
    }
}
