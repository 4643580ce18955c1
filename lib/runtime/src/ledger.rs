//! Which VMs exist, across restarts: one record per VM, on disk before anything of the VM runs and until nothing of it
//! is left.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use imp_network::spec::VmNetwork;
use imp_storage::blob::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::id::VmId;
use crate::layout::{Layout, VmLayout};
use crate::process::ProcessRecord;
use crate::spec::VmSpec;
use crate::status::{Outcome, VmStatus};
use crate::vmm::Changes;

/// Version of the form on disk.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    pub spec: VmSpec,
    pub status: VmStatus,
    pub stage: Stage,
    /// Directories of control groups that were made for the VM.
    pub cgroups: Vec<PathBuf>,
    pub network: Option<ProcessRecord>,
    /// The bridge network of the VM, from before anything of it is there.
    #[serde(default)]
    pub bridge: Option<VmNetwork>,
    #[serde(default)]
    pub origin: Origin,
    #[serde(default)]
    pub purpose: Purpose,
    /// Unknown before it boots, and of VMs of owners that did not write it down.
    #[serde(default)]
    pub booted: Option<Booted>,
    /// Whether the VMM that runs notes what changes in its guest's memory.
    #[serde(default)]
    pub changes: Changes,
}

/// Digests of what the guest runs, whatever has taken the place of those files since it booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Booted {
    pub kernel: Digest,
    /// Of the agent, and of the kernel's modules.
    pub initramfs: Digest,
}

/// What the VM's machine begins as.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "origin")]
pub(crate) enum Origin {
    #[default]
    Boot,
    Snapshot {
        digest: Digest,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    #[default]
    Serve,
    /// For the call that makes it, which ends with its owner: until it runs nobody else has been told of it.
    Call,
    /// To become a template. Of no use to another owner.
    Template,
}

/// How much of a VM may exist. Written before the step that makes it true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "stage")]
pub(crate) enum Stage {
    /// Nothing runs.
    Created,
    /// Files, helpers and the VMM may be there; no pid is known.
    Starting { vmm_program: PathBuf },
    /// The VMM runs; its main process may not have started.
    Booting { vmm: ProcessRecord },
    /// The main process has been started.
    Running { vmm: ProcessRecord },
    /// Made of a snapshot, loaded and paused.
    Dormant { vmm: ProcessRecord },
    /// As `Dormant`, and somebody is getting it.
    Waking { vmm: ProcessRecord },
    /// As `Running`; its processes, and the machine, may stand still.
    Asleep { vmm: ProcessRecord },
    /// As `Asleep`, because its user wants it to.
    Paused { vmm: ProcessRecord },
    /// The main process has ended, or the VM goes on from a snapshot. Written before the guest is told that this is known, which
    /// it forgets then, and before the VMM is killed.
    Ended { vmm: ProcessRecord, outcome: Outcome },
    /// Nothing runs any more.
    Stopped,
}

impl Stage {
    pub(crate) fn running(vmm: ProcessRecord) -> Self {
        Self::Running { vmm }
    }
}

impl Record {
    pub(crate) fn new(spec: VmSpec, status: VmStatus, bridge: Option<VmNetwork>) -> Self {
        let (stage, cgroups) = (Stage::Created, Vec::new());
        Self {
            format: FORMAT,
            spec,
            status,
            stage,
            cgroups,
            network: None,
            bridge,
            origin: Origin::Boot,
            purpose: Purpose::Serve,
            booted: None,
            changes: Changes::NotNoted,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot make {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot remove {}", path.display())]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the record of VM {id} does not serialise")]
    Serialise {
        id: VmId,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} is not a record", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} has format {format}; this version reads {FORMAT}: use the version of imp that wrote it", path.display())]
    Format { path: PathBuf, format: u32 },
}

/// What a look at the ledger finds.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub records: Vec<Record>,
    /// Directories of VMs that have no record: made and not yet recorded, or recorded and half removed.
    pub leftovers: Vec<VmId>,
    /// Records that cannot be read. They are left alone: what they belong to is not known.
    pub unreadable: Vec<(VmId, Error)>,
}

/// Makes the VM's directory and its first record.
pub(crate) fn create(layout: &Layout, record: &Record) -> Result<(), Error> {
    let vm = layout.vm(&record.status.id);
    fs::create_dir_all(layout.vms()).map_err(|source| Error::Make { path: layout.vms(), source })?;
    fs::create_dir(vm.data()).map_err(|source| Error::Make { path: vm.data().to_owned(), source })?;
    write(&vm, record)?;
    sync_directory(&layout.vms())
}

/// Replaces the record: after a crash at any moment either the old or the new one is there, whole.
pub(crate) fn write(vm: &VmLayout, record: &Record) -> Result<(), Error> {
    replace(vm, record, File::sync_all)?;
    sync_directory(vm.data())
}

/// As `write`, for what ends with the machine that this runs on: a crash of that may leave an empty record, which is none.
pub(crate) fn write_unsynced(vm: &VmLayout, record: &Record) -> Result<(), Error> {
    replace(vm, record, |_| Ok(()))
}

fn replace(vm: &VmLayout, record: &Record, sync: impl FnOnce(&File) -> io::Result<()>) -> Result<(), Error> {
    let text = serde_json::to_vec_pretty(record)
        .map_err(|source| Error::Serialise { id: record.status.id.clone(), source })?;
    let path = vm.record();
    let new = path.with_extension("new");
    let written = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        sync(&file)?;
        fs::rename(&new, &path)
    };
    written().map_err(|source| Error::Write { path: path.clone(), source })
}

/// Removes the record first and then the directory: a crash in between leaves a directory without a record, which the
/// next look removes.
pub(crate) fn remove(vm: &VmLayout) -> Result<(), Error> {
    let path = vm.record();
    match fs::remove_file(&path) {
        Ok(()) => sync_directory(vm.data())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(Error::Remove { path, source }),
    }
    remove_directory(vm.data())
}

/// Everything that is recorded.
pub(crate) fn look(layout: &Layout) -> Result<Found, Error> {
    let mut found = Found::default();
    let entries = match fs::read_dir(layout.vms()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(source) => return Err(Error::Read { path: layout.vms(), source }),
    };
    for entry in entries {
        let entry = entry.map_err(|source| Error::Read { path: layout.vms(), source })?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<VmId>().ok()) else {
            continue;
        };
        match read(&layout.vm(&id)) {
            Ok(Some(record)) => found.records.push(record),
            Ok(None) => found.leftovers.push(id),
            Err(error) => found.unreadable.push((id, error)),
        }
    }
    found.records.sort_by_key(|record| (record.status.created, record.status.id.clone()));
    Ok(found)
}

fn read(vm: &VmLayout) -> Result<Option<Record>, Error> {
    /// Read first, so that another format is named as such and not as damage.
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let path = vm.record();
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Read { path, source }),
    };
    if text.is_empty() {
        return Ok(None);
    }
    let head: Head =
        serde_json::from_slice(&text).map_err(|source| Error::Damaged { path: path.clone(), source })?;
    if head.format != FORMAT {
        return Err(Error::Format { path, format: head.format });
    }
    serde_json::from_slice(&text).map(Some).map_err(|source| Error::Damaged { path, source })
}

/// Removes a directory and all in it; one that is not there is no error.
pub(crate) fn remove_directory(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::Remove { path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

fn sync_directory(path: &Path) -> Result<(), Error> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(|source| Error::Write { path: path.to_owned(), source })
}
