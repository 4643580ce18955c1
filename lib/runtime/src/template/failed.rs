//! What is said of a machine that did not become a template: at which step, what the guest said, and where its console is.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::InitCommand;
use crate::runtime::Runtime;
use crate::status::{Failure, Outcome};

/// How the machine of a template ended before there was one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    pub outcome: Outcome,
    /// Of an init command that failed: the how manieth it was, of how many.
    pub init: Option<(usize, usize)>,
    /// Where its console is kept until the next template fails.
    pub console: Option<PathBuf>,
}

impl Failed {
    pub(super) async fn new(runtime: &Runtime, outcome: Outcome, init: &[InitCommand]) -> Self {
        let number = match &outcome {
            Outcome::Failed { failure: Failure::Init { command, .. }, .. } => {
                init.iter().position(|one| one.arguments.to_string() == *command)
            }
            _ => None,
        };
        let console = match &outcome {
            Outcome::Failed { console, .. } => keep_console(runtime, console.clone()).await,
            Outcome::Exited { .. }
            | Outcome::Signalled { .. }
            | Outcome::NotStarted { .. }
            | Outcome::Killed
            | Outcome::PoweredOff => None,
        };
        Self { outcome, init: number.map(|number| (number + 1, init.len())), console }
    }
}

/// The machine goes with all that it had, but whoever looks for the reason wants to read this.
pub(super) async fn keep_console(runtime: &Runtime, lines: Vec<String>) -> Option<PathBuf> {
    if lines.is_empty() {
        return None;
    }
    let context = Arc::clone(runtime.context());
    let kept = tokio::task::spawn_blocking(move || {
        let path = context.layout.template_console();
        std::fs::write(&path, lines.join("\n") + "\n").map(|()| path)
    });
    match kept.await {
        Ok(Ok(path)) => Some(path),
        Ok(Err(error)) => {
            tracing::warn!(%error, "the console of a machine that became no template is lost");
            None
        }
        Err(_) => None,
    }
}

/// Where a console is, for the end of a message.
pub(super) fn kept(console: &Option<PathBuf>) -> String {
    console.as_ref().map_or_else(String::new, |path| format!("\nits console is in {}", path.display()))
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Failed { failure: Failure::Init { command, outcome, output }, .. } => {
                match self.init {
                    Some((number, of)) => {
                        write!(f, "init command {number} of {of} failed ({outcome}): {command}")?
                    }
                    None => write!(f, "an init command failed ({outcome}): {command}")?,
                }
                if !output.trim().is_empty() {
                    write!(f, "\n{}", output.trim_end())?;
                }
            }
            Outcome::Failed { failure, console } => {
                write!(f, "{failure}")?;
                if failure.is_on_console() && !console.is_empty() {
                    write!(f, "\n{}", console.join("\n"))?;
                }
            }
            Outcome::Exited { code } => write!(f, "its main process exited with {code}")?,
            Outcome::Signalled { signal, .. } => write!(f, "its main process was ended by signal {signal}")?,
            Outcome::NotStarted { why, .. } => write!(f, "its main process could not be started: {why}")?,
            Outcome::Killed => f.write_str("it was killed")?,
            Outcome::PoweredOff => f.write_str("it powered off")?,
        }
        f.write_str(&kept(&self.console))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_init_command_that_failed_is_told_with_its_own_words_and_not_with_the_console() {
        let failure = Failure::Init {
            command: "sh -c make".into(),
            outcome: "exit status 2".into(),
            output: "no rule\n".into(),
        };
        let outcome = Outcome::Failed { failure, console: vec!["[    0.1] PCI: Fatal".into()] };
        let failed = Failed { outcome, init: Some((2, 3)), console: Some("/d/console.log".into()) };
        let expected = "init command 2 of 3 failed (exit status 2): sh -c make\nno rule\nits console is in /d/console.log";
        assert_eq!(failed.to_string(), expected);
    }

    #[test]
    fn a_machine_that_broke_is_told_with_its_console() {
        let failure = Failure::EndedInBoot { vmm: crate::status::VmmEnd::Reset };
        let outcome = Outcome::Failed { failure, console: vec!["Kernel panic".into()] };
        let failed = Failed { outcome, init: None, console: None };
        assert!(failed.to_string().ends_with("\nKernel panic"), "{failed}");
    }
}
