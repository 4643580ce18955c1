//! Variables and secrets, as flags of several commands.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use imp_runtime::spec::Environment;

use crate::commands::run::env_file;

#[derive(Debug, Args)]
pub(crate) struct Variables {
    /// A variable of the program's environment; NAME alone takes its value from here. May be repeated
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<std::ffi::OsString>,
    /// A file with variables, one NAME=VALUE in a line. May be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Secrets {
    /// A variable that is in no record, list or log; for VMs made of a template. May be repeated
    ///
    /// NAME alone takes the value from here, so that it stands on no command line. It is in the VM's memory, and so on disk
    /// once the VM is forked or suspended, which takes --with-secrets.
    #[arg(long = "secret", value_name = "NAME[=VALUE]")]
    secrets: Vec<OsString>,
}

impl Variables {
    /// Those of files, in order.
    pub(crate) fn of_files(&self) -> anyhow::Result<Vec<OsString>> {
        let files: Vec<Vec<_>> =
            self.env_file.iter().map(|path| env_file::read(path)).collect::<Result<_, _>>()?;
        Ok(files.concat())
    }

    /// For what is started in a VM that has an environment already. A name that has no value here says nothing.
    pub(crate) fn environment(
        &self,
        host: impl Fn(&OsStr) -> Option<OsString>,
    ) -> anyhow::Result<Environment> {
        let files = self.of_files()?;
        let written = files.iter().chain(&self.env);
        let variables = written.filter_map(|variable| whole(variable, &host));
        Ok(Environment::new(variables)?)
    }
}

impl Secrets {
    /// A name that has no value here is an error: a program would run without it.
    pub(crate) fn environment(
        &self,
        host: impl Fn(&OsStr) -> Option<OsString>,
    ) -> anyhow::Result<Environment> {
        let secrets = self.secrets.iter().map(|secret| {
            let name = || secret.to_string_lossy().into_owned();
            whole(secret, &host)
                .with_context(|| format!("the secret {} has no value here: set that variable", name()))
        });
        Ok(Environment::new(secrets.collect::<Result<Vec<_>, _>>()?)?)
    }
}

/// `NAME=value`, also of a name alone.
fn whole(variable: &OsStr, host: &impl Fn(&OsStr) -> Option<OsString>) -> Option<Vec<u8>> {
    if variable.as_bytes().contains(&b'=') {
        return Some(variable.as_bytes().to_vec());
    }
    Some([variable.as_bytes(), b"=", &host(variable)?.into_vec()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &OsStr) -> Option<OsString> {
        (name == "HERE").then(|| "a=b".into())
    }

    #[test]
    fn a_name_alone_takes_its_value_from_here() {
        let env = ["A=1", "HERE", "NOWHERE"].map(OsString::from).to_vec();
        let variables = Variables { env, env_file: Vec::new() };
        assert_eq!(variables.environment(host).unwrap().expose(), [&b"A=1"[..], b"HERE=a=b"]);
    }

    #[test]
    fn a_secret_without_a_value_is_an_error_that_names_it() {
        let of = |name: &str| Secrets { secrets: vec![name.into()] }.environment(host);
        assert_eq!(of("HERE").unwrap().expose(), [b"HERE=a=b"]);
        assert!(of("NOWHERE").unwrap_err().to_string().contains("NOWHERE"));
    }
}
