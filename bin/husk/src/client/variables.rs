//! Variables and secrets from where a user has them. No error shows a value.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::args::Activate;
use crate::protocol::{LONGEST, Variables};

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("--env must look like NAME=VALUE")]
    NotAVariable,
    #[error(
        "--secret takes a name alone: a value on a command line is seen by all. Give it as the variable of that name, or with --secret-file"
    )]
    ValueOnCommandLine,
    #[error("the secret {name} has no value here: set that variable")]
    NoValue { name: String },
    #[error("cannot read the variables in {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has more than {LONGEST} bytes", path.display())]
    TooLong { path: PathBuf },
    #[error("{} is not UTF-8", path.display())]
    NotText { path: PathBuf },
    #[error("{}, line {line}, is not NAME=VALUE", path.display())]
    Line { path: PathBuf, line: usize },
    #[error("{} begins like an object of JSON and is not one that leads from names to texts", path.display())]
    NotAnObject { path: PathBuf },
}

/// Of the environment, and the secrets. `host`: the variables of this command.
pub(super) fn of(
    args: &Activate,
    host: impl Fn(&str) -> Option<String>,
) -> Result<(Variables, Variables), Error> {
    let (mut environment, mut secrets) = (Variables::default(), Variables::default());
    for path in &args.env_file {
        environment.extend(of_file(path)?);
    }
    for variable in &args.env {
        let (name, value) = variable.split_once('=').ok_or(Error::NotAVariable)?;
        environment.insert(name.to_owned(), value.to_owned());
    }
    for path in &args.secret_file {
        secrets.extend(of_file(path)?);
    }
    for name in &args.secret {
        if name.contains('=') {
            return Err(Error::ValueOnCommandLine);
        }
        let value = host(name).ok_or_else(|| Error::NoValue { name: name.clone() })?;
        secrets.insert(name.clone(), value);
    }
    Ok((environment, secrets))
}

fn of_file(path: &Path) -> Result<Variables, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    if path == Path::new("-") {
        return read(path, io::stdin().lock());
    }
    read(path, File::open(path).map_err(failed)?)
}

fn read(path: &Path, from: impl Read) -> Result<Variables, Error> {
    let path = || path.to_owned();
    let mut bytes = Vec::new();
    let most = LONGEST as u64 + 1;
    from.take(most).read_to_end(&mut bytes).map_err(|source| Error::Read { path: path(), source })?;
    if bytes.len() > LONGEST {
        return Err(Error::TooLong { path: path() });
    }
    let text = String::from_utf8(bytes).map_err(|_| Error::NotText { path: path() })?;
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(&text).map_err(|_| Error::NotAnObject { path: path() });
    }
    let mut variables = Variables::default();
    for (number, line) in text.lines().enumerate() {
        let start = line.trim_start();
        if start.is_empty() || start.starts_with('#') {
            continue;
        }
        let variable = start.split_once('=').filter(|(name, _)| !name.contains(char::is_whitespace));
        let (name, value) = variable.ok_or_else(|| Error::Line { path: path(), line: number + 1 })?;
        variables.insert(name.to_owned(), value.to_owned());
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Arguments, Command};

    fn variables(text: &str) -> Result<Vec<Vec<u8>>, Error> {
        Ok(read(Path::new("file"), text.as_bytes())?.environment().unwrap().expose().to_vec())
    }

    #[test]
    fn lines_are_literal_and_an_object_may_hold_what_no_line_can() {
        assert_eq!(variables("# c\n\nB=\"q\" \n A=1=2\r\n").unwrap(), [&b"A=1=2"[..], b"B=\"q\" "]);
        assert_eq!(variables("{\"KEY\": \"one\\ntwo\"}").unwrap(), [b"KEY=one\ntwo"]);
    }

    #[test]
    fn what_is_wrong_is_named_without_what_it_says() {
        for text in ["A=1\nhunter2", "A B=hunter2", "{\"A\":7,\"hunter2\":1}", "{hunter2"] {
            let error = variables(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        assert!(matches!(variables(&"x".repeat(LONGEST + 1)), Err(Error::TooLong { .. })));
    }

    #[test]
    fn a_secret_on_the_command_line_is_a_name_alone() {
        let of = |secret: &str| {
            let line = ["husk", "activate", "--control-socket", "s", "--secret", secret];
            let Command::Activate(args) = Arguments::try_parse_from(line).unwrap().command else { panic!() };
            super::of(&args, |name| (name == "TOKEN").then(|| "hunter2".to_owned()))
        };
        assert_eq!(of("TOKEN").unwrap().1.environment().unwrap().expose(), [b"TOKEN=hunter2"]);
        assert!(matches!(of("TOKEN=hunter2"), Err(Error::ValueOnCommandLine)));
        assert!(matches!(of("OTHER"), Err(Error::NoValue { .. })));
    }
}
