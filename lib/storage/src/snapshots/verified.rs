//! That a snapshot holds what its manifest says is found out once on each machine; later opens only compare.
//!
//! Where the file system has fs-verity, the files are sealed: the kernel checks them while they are read, and knows them by
//! a digest. Elsewhere they are known by inode, size and times of change, in a directory that only this user may write:
//! whoever could deceive that could change the record, too. Files that changed are hashed again.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use imp_sys::verity::{self, Sealed};
use serde::{Deserialize, Serialize};

use super::chunks::Index;
use super::error::{Error, write_error};
use super::files;
use super::manifest::{Manifest, Part};
use super::mismatch::Mismatch;
use super::scan::{self, Zeros};
use crate::blob::digest::Digest;
use crate::store::layout::Layout;
use crate::store::lock::StoreLock;
use crate::store::records;

/// How the files of a snapshot are kept from changing unnoticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protection {
    /// By the kernel, where it can.
    Sealed,
    Pinned,
}

impl Protection {
    /// `never_sealed`: VMMs that open memory for writing.
    pub(super) fn of(manifest: &Manifest, never_sealed: &[String]) -> Self {
        // Sealing reads a file once more, which a snapshot that nobody hashed is not worth.
        if manifest.local.is_some() || never_sealed.contains(&manifest.description.vmm.name) {
            Self::Pinned
        } else {
            Self::Sealed
        }
    }
}

/// What was verified, and by what it is known since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    memory: Seal,
    state: Seal,
    scratch: Seal,
    /// When the machine that made a local snapshot started.
    #[serde(skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Seal {
    /// The digest by which the kernel knows the file.
    Verity(Digest),
    Pinned(Identity),
}

/// What differs once a file is another one, or was written to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self {
            device: data.dev(),
            inode: data.ino(),
            size: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }
}

impl Record {
    fn seal(&self, part: Part) -> &Seal {
        match part {
            Part::Memory => &self.memory,
            Part::State => &self.state,
            Part::Scratch => &self.scratch,
        }
    }

    /// Whether all files are sealed by the kernel.
    pub(super) fn is_sealed(&self) -> bool {
        Part::ALL.iter().all(|part| matches!(self.seal(*part), Seal::Verity(_)))
    }
}

/// Protects the files of a snapshot whose content is known, and says by what they are known from now on.
pub(super) fn protect(
    directory: &Path,
    manifest: &Manifest,
    protection: Protection,
) -> Result<Record, Error> {
    let boot = manifest.local.is_some().then(boot_id).transpose()?;
    let protect = |part| protect_part(directory, part, protection);
    Ok(Record {
        memory: protect(Part::Memory)?,
        state: protect(Part::State)?,
        scratch: protect(Part::Scratch)?,
        boot,
    })
}

fn protect_part(directory: &Path, part: Part, protection: Protection) -> Result<Seal, Error> {
    let path = files::part(directory, part);
    let failed = |source| write_error(&path, source);
    let mode = match protection {
        // Readable to whoever reaches it: a VMM in a jail has a user of its own, and the directories above are closed.
        Protection::Sealed => 0o444,
        Protection::Pinned => 0o644,
    };
    let user = rustix::process::geteuid().as_raw();
    // A VMM with a user of its own may have made it, and could give itself the right to write again.
    if fs::metadata(&path).map_err(failed)?.uid() != user {
        chown(&path, Some(user), Some(rustix::process::getegid().as_raw())).map_err(failed)?;
    }
    fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(failed)?;
    let file = File::open(&path).map_err(failed)?;
    if protection == Protection::Sealed {
        match verity::enable(&file) {
            Ok(Sealed::Now | Sealed::Before) => {
                if let Some(digest) = verity::measure(&file).map_err(failed)? {
                    return Ok(Seal::Verity(Digest::from_bytes(digest)));
                }
            }
            Ok(Sealed::Unsupported) => {}
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                return Err(Error::StillWritten { part, path });
            }
            Err(source) => return Err(failed(source)),
        }
    }
    Ok(Seal::Pinned(Identity::of(&file).map_err(failed)?))
}

/// Makes sure that a snapshot's files hold what its manifest says.
pub(super) fn verify(
    layout: &Layout,
    snapshot: &Digest,
    manifest: &Manifest,
    never_sealed: &[String],
) -> Result<(), Error> {
    let directory = layout.snapshot(snapshot);
    let refused = |reason| Error::Refused { snapshot: *snapshot, reason };
    let parts = open_parts(&directory, snapshot, manifest)?;
    if is_known(layout, snapshot, &parts)? {
        return Ok(());
    }
    if manifest.local.is_some() {
        return Err(refused(local_reason(layout, snapshot, &parts)?));
    }
    // One process hashes, others wait for it.
    let lock = File::open(files::manifest(&directory)).and_then(|file| file.lock().map(|()| file));
    let _hashing = lock.map_err(|source| Error::Read { path: directory.clone(), source })?;
    if is_known(layout, snapshot, &parts)? {
        return Ok(());
    }
    rehash(layout, snapshot, manifest)?;
    let record = protect(&directory, manifest, Protection::of(manifest, never_sealed))?;
    let using = StoreLock::shared(layout)?;
    Ok(records::write(layout, &layout.verified(snapshot), &record, &using)?)
}

/// Hashes all files, whatever is known of them.
pub(super) fn rehash(layout: &Layout, snapshot: &Digest, manifest: &Manifest) -> Result<(), Error> {
    let directory = layout.snapshot(snapshot);
    let refused = |reason| Error::Refused { snapshot: *snapshot, reason };
    for (part, file) in open_parts(&directory, snapshot, manifest)? {
        let content = manifest.parts.get(part);
        let Some(chunks) = &content.chunks else { continue };
        let path = files::part(&directory, part);
        let found = scan::index(&file, content.size, Zeros::Kept);
        let found = found.map_err(|source| Error::Read { path: path.clone(), source })?;
        if found.digest() != chunks.digest {
            let at = match index(&directory, manifest, part)? {
                Some(expected) => expected.differing(&found).next().unwrap_or(0),
                None => 0,
            };
            return Err(refused(Mismatch::Damaged { part, at }));
        }
        // The index is used to compare and to carry, so it must not be damaged either.
        if index(&directory, manifest, part)?.is_none() {
            let path = files::index(&directory, part);
            let rewritten = fs::write(&path, found.bytes());
            rewritten.map_err(|source| write_error(&path, source))?;
        }
    }
    Ok(())
}

/// The index of a part; None if it is missing or damaged, or the snapshot has none.
pub(super) fn index(directory: &Path, manifest: &Manifest, part: Part) -> Result<Option<Index>, Error> {
    let content = manifest.parts.get(part);
    let Some(chunks) = &content.chunks else { return Ok(None) };
    let path = files::index(directory, part);
    match fs::read(&path) {
        Ok(bytes) if Digest::of(&bytes) == chunks.digest => Ok(Index::parse(content.size, &bytes).ok()),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path, source }),
    }
}

fn open_parts(directory: &Path, snapshot: &Digest, manifest: &Manifest) -> Result<[(Part, File); 3], Error> {
    let open = |part| open_part(directory, snapshot, manifest, part).map(|file| (part, file));
    Ok([open(Part::Memory)?, open(Part::State)?, open(Part::Scratch)?])
}

/// Opens a part that has the size that it must have.
fn open_part(directory: &Path, snapshot: &Digest, manifest: &Manifest, part: Part) -> Result<File, Error> {
    let refused = |reason| Error::Refused { snapshot: *snapshot, reason };
    let path = files::part(directory, part);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(refused(Mismatch::Missing { part }));
        }
        Err(source) => return Err(Error::Read { path, source }),
    };
    let found = file.metadata().map_err(|source| Error::Read { path, source })?.len();
    let expected = manifest.parts.get(part).size;
    if found == expected { Ok(file) } else { Err(refused(Mismatch::Size { part, expected, found })) }
}

/// Whether the files are those that were verified.
fn is_known(layout: &Layout, snapshot: &Digest, parts: &[(Part, File)]) -> Result<bool, Error> {
    let Some(record) = record(layout, snapshot)? else { return Ok(false) };
    if record.boot.is_some() && record.boot != Some(boot_id()?) {
        return Ok(false);
    }
    for (part, file) in parts {
        let failed = |source| Error::Read { path: files::part(&layout.snapshot(snapshot), *part), source };
        let is_same = match record.seal(*part) {
            Seal::Verity(digest) => {
                verity::measure(file).map_err(failed)?.map(Digest::from_bytes) == Some(*digest)
            }
            Seal::Pinned(identity) => Identity::of(file).map_err(failed)? == *identity,
        };
        if !is_same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Why a local snapshot is not what was made: nobody can tell by its content.
fn local_reason(layout: &Layout, snapshot: &Digest, parts: &[(Part, File)]) -> Result<Mismatch, Error> {
    let Some(record) = record(layout, snapshot)? else { return Ok(Mismatch::Restarted) };
    if record.boot != Some(boot_id()?) {
        return Ok(Mismatch::Restarted);
    }
    let changed = parts.iter().find(|(part, file)| {
        !Identity::of(file).is_ok_and(|identity| Seal::Pinned(identity) == *record.seal(*part))
    });
    Ok(Mismatch::Changed { part: changed.map_or(Part::Memory, |(part, _)| *part) })
}

pub(super) fn record(layout: &Layout, snapshot: &Digest) -> Result<Option<Record>, Error> {
    Ok(records::read(&layout.verified(snapshot))?)
}

/// Whether the machine has restarted since a local snapshot was made.
pub(super) fn is_outlived(layout: &Layout, snapshot: &Digest) -> Result<bool, Error> {
    let boot = boot_id()?;
    Ok(record(layout, snapshot)?.is_none_or(|record| record.boot.as_ref() != Some(&boot)))
}

/// Differs between any two starts of this machine.
fn boot_id() -> Result<String, Error> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    Ok(text.trim().to_owned())
}
