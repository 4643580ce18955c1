//! The way to the owner: connects to the one that lives, replaces one of another build, starts one if there is none.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use imp_protocol::connection;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Command;

use crate::client::{self, Identity, Owner};
use crate::layout::{Layout, make_private};

/// How long an owner may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a new owner may take to adopt the VMs there are.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Pause before another look, while somebody else starts or ends an owner.
const PAUSE: Duration = Duration::from_millis(20);

/// First line of an owner that serves, on its stdout.
pub const READY: &str = "ready";
/// First line of an owner that found another one.
pub const OWNED: &str = "owned";
/// Beginning of the first line of an owner that failed.
pub const FAILED: &str = "failed: ";

/// Variables of the user's environment that the owner gets: what decides where things are, and no secrets.
const KEPT: [&str; 9] = [
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "LANG",
    "RUST_BACKTRACE",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
    "IMP_LOG",
];

/// How an owner is found and started.
#[derive(Debug, Clone)]
pub struct Starter {
    pub layout: Layout,
    /// The program that becomes the owner, and its arguments.
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Build that the owner must have.
    pub build: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect to the owner of the VMs at {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the owner of the VMs at {path} does not answer; end it with `imp owner stop` (its VMs go on) and try again"
    )]
    Silent { path: PathBuf },
    #[error("the owner of the VMs did not say who it is")]
    Identify(#[source] Box<client::Error>),
    #[error("cannot use {path}")]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start the owner of the VMs ({program})")]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the owner of the VMs could not start: {reason}; its log is {log}")]
    Failed { reason: String, log: PathBuf },
    #[error("the owner of the VMs was not ready within {} s; its log is {log}", START_PATIENCE.as_secs())]
    Slow { log: PathBuf },
}

/// Tells this program from every other build, as long as files keep their times.
pub fn build_of(program: &Path) -> io::Result<String> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(program)?;
    Ok(format!("{}-{}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
}

/// The owner that lives, of whatever build; none is not an error.
pub async fn find(layout: &Layout) -> Result<Option<Owner>, Error> {
    let path = layout.socket();
    match UnixStream::connect(&path).await {
        // One that hangs up at once is ending.
        Ok(stream) => Ok(connection::connect_owner(stream).await.ok().map(Owner::new)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Ok(None),
            _ => Err(Error::Connect { path, source: error }),
        },
    }
}

impl Starter {
    /// The owner, started if there is none, replaced if it is of another build.
    pub async fn owner(&self) -> Result<Owner, Error> {
        tokio::time::timeout(START_PATIENCE, self.try_until_there())
            .await
            .unwrap_or_else(|_| Err(Error::Slow { log: self.layout.log() }))
    }

    async fn try_until_there(&self) -> Result<Owner, Error> {
        loop {
            let Some(owner) = find(&self.layout).await? else {
                self.start().await?;
                continue;
            };
            match self.identify(&owner).await {
                Ok(identity) if identity.build == self.build => return Ok(owner),
                Ok(_) => {
                    // It may end before it answers.
                    let _ = tokio::time::timeout(PATIENCE, owner.hand_over()).await;
                }
                // It ended between our knock and our question.
                Err(Error::Identify(error)) if matches!(*error, client::Error::Lost(_)) => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn identify(&self, owner: &Owner) -> Result<Identity, Error> {
        match tokio::time::timeout(PATIENCE, owner.identify()).await {
            Ok(identity) => identity.map_err(|error| Error::Identify(Box::new(error))),
            Err(_) => Err(Error::Silent { path: self.layout.socket() }),
        }
    }

    /// Starts an owner and waits until it serves, or until it has found another one.
    async fn start(&self) -> Result<(), Error> {
        for path in [&self.layout.data, &self.layout.runtime] {
            make_private(path).map_err(|source| Error::Directory { path: path.clone(), source })?;
        }
        // A pipe of the user's shell that the owner held open would never end.
        if let Err(error) = imp_sys::descriptors::close_on_exec_above_standard() {
            tracing::warn!(%error, "the owner inherits open files");
        }
        let spawn = |source| Error::Spawn { program: self.program.clone(), source };
        let kept = KEPT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .envs(kept)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(spawn)?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).await.map_err(spawn)?;
        }
        match line.trim_end() {
            READY => Ok(()),
            OWNED => {
                tokio::time::sleep(PAUSE).await;
                Ok(())
            }
            other => Err(Error::Failed {
                reason: other.strip_prefix(FAILED).unwrap_or("it ended without a word").to_owned(),
                log: self.layout.log(),
            }),
        }
    }
}
