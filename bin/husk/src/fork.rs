//! Snapshots of the active machine, for machines that other husks make of them.
//!
//! ```text
//! record ─► snapshot, kept by the fork's name ─► link in the directory of forks          removed the other way round
//! ```
//!
//! A fork whose husk was killed on the way has a record and no link, and goes when the next husk starts.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imp_runtime::{VmId, WithSecrets};
use serde::{Deserialize, Serialize};

use crate::husk::{Deadline, Husk};
use crate::layout::Layout;
use crate::lifecycle::{Ask, Outcome, Refused};
use crate::protocol::{Answer, ForkSnapshot, Id, RemoveForkSnapshot, Stages};
use crate::refusal::Refusal;

/// What there may be of a fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The machine that the snapshot is of.
    pub(crate) vm: VmId,
    /// Where the snapshot is to be found.
    pub(crate) link: PathBuf,
}

impl Record {
    /// The name by which the store keeps the snapshot.
    fn kept_by(&self, fork: &Id) -> String {
        format!("fork-{}-{}", self.vm, fork.as_str())
    }
}

impl Husk {
    pub(crate) async fn fork_snapshot(
        self: &Arc<Self>,
        request: ForkSnapshot,
        deadline: Deadline,
    ) -> Result<Answer, Refusal> {
        self.may(Ask::Fork)?;
        let link = self.link(&request).await?;
        self.begin(Ask::Fork)?;
        let (husk, fork) = (Arc::clone(self), request.fork.clone());
        let whole = {
            let (husk, fork) = (Arc::clone(self), request.fork.clone());
            async move { husk.fork_whole(&fork, link, request.with_secrets).await }
        };
        let forked = self
            .in_time(deadline, whole, |late| {
                // Nobody was told of it.
                tokio::spawn(async move {
                    if let Ok(Ok(_)) = late.await {
                        husk.forget(&fork).await;
                    }
                    husk.over(Outcome::Forked);
                });
            })
            .await;
        if !matches!(forked, Err(Refusal::Late(_))) {
            self.over(Outcome::Forked);
        }
        let (link, stages) = forked?;
        Ok(Answer { snapshot_dir: Some(link), stages, ..Answer::good() })
    }

    async fn fork_whole(
        self: &Arc<Self>,
        fork: &Id,
        link: PathBuf,
        with_secrets: bool,
    ) -> Result<(PathBuf, Stages), Refusal> {
        let vm = self.machine().ok_or(Refused::NotActive)?;
        if self.layout.fork_record(fork).exists() {
            return Err(Refusal::ForkExists { fork: fork.as_str().to_owned() });
        }
        if link.symlink_metadata().is_ok() {
            return Err(Refusal::InTheWay { path: link });
        }
        let record = Record { vm, link };
        write(&self.layout, fork, &record)?;
        self.add_fork(fork.clone());
        let made = self.make_fork(fork, &record, with_secrets).await;
        if made.is_err() {
            self.forget(fork).await;
        }
        Ok((record.link, made?))
    }

    async fn make_fork(&self, fork: &Id, record: &Record, with_secrets: bool) -> Result<Stages, Refusal> {
        let secrets = if with_secrets { WithSecrets::Allowed } else { WithSecrets::Refused };
        let made = self.runtime.fork_snapshot(&record.vm, secrets, &record.kept_by(fork)).await;
        let made = made.map_err(|error| Refusal::NotForked(Box::new(error)))?;
        let directory = self.runtime.snapshot_directory(&made.snapshot);
        let failed = |source| Refusal::File { path: record.link.clone(), source };
        // By its own place: the link may be followed from another workdir.
        let directory = fs::canonicalize(directory).map_err(failed)?;
        symlink(directory, &record.link).map_err(failed)?;
        let mut stages = Stages::default();
        stages.push("freeze", made.times.freeze);
        stages.push("create_snapshot", made.times.paused);
        stages.push("keep", made.times.keep);
        stages.push("resume", made.rouse);
        Ok(stages)
    }

    pub(crate) async fn remove_fork_snapshot(
        self: &Arc<Self>,
        request: RemoveForkSnapshot,
        deadline: Deadline,
    ) -> Result<Answer, Refusal> {
        let fork = request.fork;
        self.begin(Ask::RemoveFork)?;
        let husk = Arc::clone(self);
        let whole = async move {
            let is_there = husk.layout.fork_record(&fork).exists();
            if is_there {
                husk.forget(&fork).await;
            }
            husk.over(Outcome::Forked);
            if is_there { Ok(()) } else { Err(Refusal::NoFork { fork: fork.as_str().to_owned() }) }
        };
        self.in_time(deadline, whole, drop).await?;
        Ok(Answer::good())
    }

    /// Takes away all of a fork but what other machines were made of.
    pub(crate) async fn forget(&self, fork: &Id) {
        match undo(&self.runtime, &self.layout, fork).await {
            Ok(()) => self.remove_fork(fork),
            Err(error) => {
                let error = imp_protocol::causes::chain(&error);
                tracing::error!(
                    fork = fork.as_str(),
                    error,
                    "something of a fork stays until the next start"
                );
            }
        }
    }

    async fn link(&self, request: &ForkSnapshot) -> Result<PathBuf, Refusal> {
        let Some(asked) = &request.directory else { return Ok(self.layout.fork(&request.fork)) };
        let real = |path: &Path| {
            let path = path.to_owned();
            async move { tokio::fs::canonicalize(path).await.ok() }
        };
        let outside = || Refusal::OutsideForks { path: asked.clone(), forks: self.layout.forks.clone() };
        let (Some(parent), Some(name)) = (asked.parent(), asked.file_name()) else { return Err(outside()) };
        let forks = real(&self.layout.forks).await.ok_or_else(outside)?;
        if real(parent).await.is_some_and(|parent| parent == forks) {
            Ok(self.layout.forks.join(name))
        } else {
            Err(outside())
        }
    }
}

/// Which forks there are, once those are gone that nobody was told of or whose machine is not there any more.
pub(crate) async fn repair(
    runtime: &imp_runtime::Runtime,
    layout: &Layout,
    machine: Option<&VmId>,
) -> Result<Vec<Id>, Refusal> {
    let mut there = Vec::new();
    for fork in recorded(layout)? {
        let record = read(layout, &fork)?;
        let is_whole = record.as_ref().is_some_and(|record| record.link.is_dir());
        if is_whole && record.is_some_and(|record| Some(&record.vm) == machine) {
            there.push(fork);
        } else {
            undo(runtime, layout, &fork).await?;
        }
    }
    Ok(there)
}

async fn undo(runtime: &imp_runtime::Runtime, layout: &Layout, fork: &Id) -> Result<(), Refusal> {
    if let Some(record) = read(layout, fork)? {
        if record.link.is_symlink() {
            removed(&record.link)?;
        }
        let kept_by = record.kept_by(fork);
        runtime.forget_fork(&kept_by).await.map_err(|error| Refusal::NotForked(Box::new(error)))?;
    }
    removed(&layout.fork_record(fork))
}

fn recorded(layout: &Layout) -> Result<Vec<Id>, Refusal> {
    let path = layout.fork_records();
    let failed = |source| Refusal::File { path: path.clone(), source };
    let mut forks = Vec::new();
    for entry in fs::read_dir(&path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        match entry.file_name().to_str().and_then(Id::parse) {
            Some(fork) => forks.push(fork),
            // One that was being written.
            None => removed(&entry.path())?,
        }
    }
    Ok(forks)
}

/// None also of one that is damaged: it says nothing.
fn read(layout: &Layout, fork: &Id) -> Result<Option<Record>, Refusal> {
    let path = layout.fork_record(fork);
    match fs::read(&path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Refusal::File { path, source }),
    }
}

/// Not synced: no snapshot of a fork outlives the machine.
fn write(layout: &Layout, fork: &Id, record: &Record) -> Result<(), Refusal> {
    let path = layout.fork_record(fork);
    // No id has a dot.
    let new = path.with_extension("new");
    let bytes = serde_json::to_vec(record).expect("a record has no map whose keys are not text");
    fs::write(&new, bytes)
        .and_then(|()| fs::rename(&new, &path))
        .map_err(|source| Refusal::File { path, source })
}

fn removed(path: &Path) -> Result<(), Refusal> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(Refusal::File { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_of_a_fork_is_read_again_and_what_was_half_written_goes() {
        let folder = tempfile::tempdir().unwrap();
        let workdir = folder.path().to_owned();
        let layout = Layout { runtime: workdir.join("run"), forks: workdir.join("forks"), workdir };
        layout.make().unwrap();
        let fork = Id::parse("one").unwrap();
        let record = Record { vm: VmId::from_random([1; 8]), link: layout.fork(&fork) };
        assert_eq!(read(&layout, &fork).unwrap(), None);
        write(&layout, &fork, &record).unwrap();
        fs::write(layout.fork_records().join("two.new"), b"{").unwrap();
        assert_eq!(recorded(&layout).unwrap(), std::slice::from_ref(&fork));
        assert_eq!(fs::read_dir(layout.fork_records()).unwrap().count(), 1);
        assert_eq!(read(&layout, &fork).unwrap(), Some(record));
    }
}
