//! What a command's end means to the shell that called it.

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::Arguments;
use crate::commands::run::flags::explain;

/// Exit status of a command that failed by itself, where that must be told from the program it runs.
pub(crate) const OWN_FAILURE: u8 = 125;
/// Exit status of a process that wrote to a pipe which nobody reads.
const BROKEN_PIPE: u8 = 141;
/// Exit status of a command line that makes no sense.
const USAGE: u8 = 2;

/// A command that failed, and the exit status that says so.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) error: anyhow::Error,
}

impl Failure {
    pub(crate) fn of(code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: error.into() }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::of(1, error)
    }
}

/// Exit status of a command, or why it has none of its own.
pub(crate) type Outcome = Result<u8, Failure>;

/// Says on stderr what went wrong, if something did.
pub(crate) fn report(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(code) => code.into(),
        Err(failure) if is_broken_pipe(&failure.error) => BROKEN_PIPE.into(),
        Err(failure) => {
            crate::output::complain(&format!("{:#}", failure.error));
            failure.code.into()
        }
    }
}

/// Marks a broken pipe as the one of this command's own output. Others (the owner's socket, say) are failures.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output any more")]
struct NobodyReads;

/// The error of a command whose output nobody reads any more.
pub(crate) fn nobody_reads() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, NobodyReads)
}

/// What became of writing this command's output.
pub(crate) fn own_output<T>(written: io::Result<T>) -> io::Result<T> {
    written.map_err(|error| if error.kind() == io::ErrorKind::BrokenPipe { nobody_reads() } else { error })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |cause: &(dyn std::error::Error + 'static)| {
        let error = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        error.is_some_and(|marked| marked.is::<NobodyReads>())
    };
    error.chain().any(broken)
}

/// Prints what clap has to say: help and version are no failures.
pub(crate) fn usage(error: clap::Error) -> ExitCode {
    let error = explain(error);
    // Nobody to tell if even that fails.
    let _ = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if runs_a_program(std::env::args_os().skip(1)) { OWN_FAILURE.into() } else { USAGE.into() }
}

/// As docker does it: a usage error of `run` is not to be taken for the program's own status.
fn runs_a_program(words: impl Iterator<Item = OsString>) -> bool {
    let commands = Arguments::command();
    let mut verbs =
        words.filter_map(|word| commands.find_subcommand(word).map(|verb| verb.get_name().to_owned()));
    verbs.next().is_some_and(|verb| verb == "run" || verb == "exec")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_decides_what_a_wrong_command_line_is_told_by() {
        let judge = |line: &str| runs_a_program(line.split(' ').map(OsString::from));
        assert!(judge("run --bad") && judge("--data-dir /x run --bad") && judge("exec"));
        assert!(!judge("ps run") && !judge("--bad"));
    }

    #[test]
    fn only_the_pipe_of_its_own_output_ends_a_command_without_a_word() {
        let lost = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(!is_broken_pipe(&anyhow::Error::new(lost()).context("the owner")));
        assert!(is_broken_pipe(
            &anyhow::Error::new(own_output::<()>(Err(lost())).unwrap_err()).context("logs")
        ));
        let full = own_output::<()>(Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert!(!is_broken_pipe(&full.into()));
    }
}
