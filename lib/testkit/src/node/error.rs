//! What can go wrong with a node, and where its console and logs were saved.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::program::Output;
use crate::machine;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Missing(#[from] machine::Error),
    #[error(
        "node VMs mount and make network devices, in namespaces of their own, and need root for it: run the tests as root"
    )]
    Root,
    #[error("{path} may not be visible in a node: share a directory in it that holds no credentials")]
    Share { path: PathBuf },
    #[error("{path}, which a node needs, could not be read")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} could not be written for a node")]
    Write { path: PathBuf, source: io::Error },
    #[error("{program} could not be run")]
    Run { program: PathBuf, source: io::Error },
    #[error("{program} failed: {said}")]
    Refused { program: PathBuf, said: String },
    #[error("network of nodes: {step}")]
    Network { step: NetworkStep, source: io::Error },
    #[error("the node was not ready within {deadline:?}; {logs}")]
    NotReady { deadline: Duration, logs: Logs },
    #[error("the node ended; {logs}")]
    Ended { logs: Logs },
    #[error("the node did not take a message; {logs}")]
    Silent { logs: Logs, source: io::Error },
    #[error("`{command}` did not start in the node: {reason}")]
    NotStarted { command: String, reason: String },
    #[error("`{command}` did not end within {deadline:?} and was killed; {output}{logs}")]
    Deadline { command: String, deadline: Duration, output: Box<Output>, logs: Logs },
    #[error("`{command}` wrote more than {limit} bytes and was killed")]
    TooMuchOutput { command: String, limit: usize },
    #[error("`{command}` {output}")]
    Failed { command: String, output: Box<Output> },
    #[error("`{command}` did not write {wanted:?} within {deadline:?}; {output}")]
    NotSaid { command: String, wanted: String, deadline: Duration, output: Box<Output> },
    #[error("{path} could not be packed for the node, or unpacked from it")]
    Pack { path: PathBuf, source: io::Error },
}

#[derive(Debug)]
pub enum NetworkStep {
    Namespace,
    Enter,
    /// The busybox command that failed.
    Device(String),
}

impl fmt::Display for NetworkStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace => f.write_str("a network namespace could not be made; is this root?"),
            Self::Enter => f.write_str("its namespace could not be entered"),
            Self::Device(command) => write!(f, "{command}"),
        }
    }
}

/// Where console and logs of a node are kept after it has gone, and the console's last lines.
#[derive(Debug, Clone, Default)]
pub struct Logs {
    pub folder: Option<PathBuf>,
    pub console: String,
}

impl fmt::Display for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.folder {
            Some(folder) => write!(f, "console and logs: {}", folder.display())?,
            None => f.write_str("console and logs could not be saved")?,
        }
        if !self.console.is_empty() {
            write!(f, "\nlast lines of the console and logs:\n{}", self.console)?;
        }
        Ok(())
    }
}
