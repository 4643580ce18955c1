//! A snapshot that is being made: a directory that nobody else sees, and that goes with its maker.
//!
//! ```text
//! the maker writes memory, state, scratch ─► hashed, zeros freed, synced ─► indexes ─► manifest.json ─► sealed
//!   ─► verified/<hex>.json ─► renamed to snapshots/<hex>
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::chunks::Index;
use super::error::{Error, write_error};
use super::manifest::{Chunks, Content, Description, FORMAT, Manifest, Part, Parts};
use super::scan::{self, Zeros};
use super::verified::{self, Protection};
use super::{Keeping, Snapshot, files, room};
use crate::blob::digest::Digest;
use crate::blob::partial::sync_parent;
use crate::store::layout::Layout;
use crate::store::lock::{Lease, StoreLock, entries};
use crate::store::records::{self, Lasting};
use crate::store::{Store, cleanup, disks};

/// A snapshot whose parts may be written. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    directory: PathBuf,
    lock_path: PathBuf,
    #[expect(dead_code, reason = "its lock tells that the maker lives")]
    lock: File,
}

impl Draft {
    pub(super) fn new(layout: &Layout, needed: u64) -> Result<Self, Error> {
        room::check(&layout.drafts(), needed)?;
        let name = format!("{}-{:016x}", std::process::id(), fastrand::u64(..));
        let directory = layout.drafts().join(&name);
        let lock_path = layout.drafts().join(format!("{name}.lock"));
        // Whoever sweeps has the store for itself, so the lock is taken before anybody looks for it.
        let _using = StoreLock::shared(layout)?;
        let lock = OpenOptions::new().write(true).create_new(true).open(&lock_path);
        let lock = lock.map_err(|source| write_error(&lock_path, source))?;
        lock.lock().map_err(|source| write_error(&lock_path, source))?;
        let draft = Self { directory, lock_path, lock };
        let made = DirBuilder::new().mode(0o700).create(&draft.directory);
        made.map_err(|source| write_error(&draft.directory, source))?;
        Ok(draft)
    }

    /// Where a part is to be written. Nothing is there yet; other files in the directory are the maker's own, and vanish.
    pub fn part(&self, part: Part) -> PathBuf {
        self.directory.join(part.name())
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // What cannot be removed now is swept later, once the lock is gone.
        let _ = fs::remove_dir_all(&self.directory);
        let _ = fs::remove_file(&self.lock_path);
    }
}

pub(super) fn commit(
    store: &Store,
    draft: Draft,
    description: Description,
    keeping: Keeping,
) -> Result<Snapshot, Error> {
    only_parts(&draft)?;
    let (local, image) = match keeping {
        Keeping::Durable => (None, disks::image_of(store, &description.base)?),
        Keeping::UntilRestart => (Some(format!("{:032x}", fastrand::u128(..))), None),
    };
    let content = |part| match keeping {
        Keeping::Durable => hashed(&draft, part),
        Keeping::UntilRestart => Ok(Content { size: size(&draft, part)?, chunks: None }),
    };
    let parts = Parts {
        memory: content(Part::Memory)?,
        state: content(Part::State)?,
        scratch: content(Part::Scratch)?,
    };
    let manifest = Manifest { format: FORMAT, description, parts, image, local };
    let bytes = manifest.bytes().map_err(Error::Description)?;
    finish(store, &draft.directory, manifest, &bytes)
}

/// Gives a directory whose parts and indexes are complete its manifest and its name. `bytes` are the manifest's, kept as they
/// came: another version of this program may write the same in another way.
pub(super) fn finish(
    store: &Store,
    directory: &Path,
    manifest: Manifest,
    bytes: &[u8],
) -> Result<Snapshot, Error> {
    let layout = &store.layout;
    let digest = Digest::of(bytes);
    let lease = Lease::on(layout, &[digest, manifest.description.base])?;
    let protection = Protection::of(&manifest, &store.options.never_sealed);
    let record = verified::protect(directory, &manifest, protection)?;
    // Nobody waits for the disk with a snapshot that a crash of the machine makes useless anyway.
    let lasting = if manifest.local.is_none() { Lasting::Yes } else { Lasting::UntilCrash };
    write_new(&files::manifest(directory), bytes, lasting)?;
    if lasting == Lasting::Yes {
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.map_err(|source| write_error(directory, source))?;
    }
    {
        let using = StoreLock::shared(layout)?;
        records::touch(layout, &digest, SystemTime::now())?;
        let target = layout.snapshot(&digest);
        if !target.exists() {
            records::write_as(layout, &layout.verified(&digest), &record, lasting, &using)?;
            match fs::rename(directory, &target) {
                // Somebody else was faster with the same.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                    ) => {}
                Err(source) => return Err(write_error(&target, source)),
                Ok(()) if lasting == Lasting::Yes => sync_parent(&target)?,
                Ok(()) => {}
            }
        }
    }
    cleanup::fit(store);
    Ok(Snapshot::new(layout, digest, manifest, lease))
}

/// What else the maker has left there is not part of the snapshot.
fn only_parts(draft: &Draft) -> Result<(), Error> {
    for path in entries(&draft.directory)? {
        if !Part::ALL.iter().any(|part| draft.part(*part) == path) {
            let removed = if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.map_err(|source| write_error(&path, source))?;
        }
    }
    Ok(())
}

fn size(draft: &Draft, part: Part) -> Result<u64, Error> {
    let path = draft.part(part);
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_file() => Ok(metadata.len()),
        Ok(_) => Err(Error::PartMissing { part, path }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::PartMissing { part, path }),
        Err(source) => Err(Error::Read { path, source }),
    }
}

fn hashed(draft: &Draft, part: Part) -> Result<Content, Error> {
    let (path, size) = (draft.part(part), size(draft, part)?);
    let file = OpenOptions::new().read(true).write(true).open(&path);
    let file = file.map_err(|source| write_error(&path, source))?;
    let index = scan::index(&file, size, Zeros::Freed);
    let index = index.map_err(|source| Error::Read { path: path.clone(), source })?;
    file.sync_all().map_err(|source| write_error(&path, source))?;
    drop(file);
    write_index(&draft.directory, part, &index)?;
    Ok(Content { size, chunks: Some(Chunks { size: index.chunk_size(), digest: index.digest() }) })
}

pub(super) fn write_index(directory: &Path, part: Part, index: &Index) -> Result<(), Error> {
    write_new(&files::index(directory, part), &index.bytes(), Lasting::Yes)
}

fn write_new(path: &Path, bytes: &[u8], lasting: Lasting) -> Result<(), Error> {
    let written = File::create_new(path).and_then(|mut file| {
        file.write_all(bytes)?;
        if lasting == Lasting::Yes { file.sync_all() } else { Ok(()) }
    });
    written.map_err(|source| write_error(path, source))
}

/// Removes the drafts of makers that do not live. The caller has the store for itself.
pub(super) fn sweep(layout: &Layout, _removing: &StoreLock) -> Result<(), Error> {
    let drafts = entries(&layout.drafts())?;
    let is_lock = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "lock");
    let mut living = Vec::new();
    for lock in drafts.iter().filter(is_lock) {
        let file = match File::open(lock) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::Read { path: lock.clone(), source }),
        };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => living.push(lock.with_extension("")),
            Err(TryLockError::Error(source)) => return Err(Error::Read { path: lock.clone(), source }),
            Ok(()) => fs::remove_file(lock).map_err(|source| write_error(lock, source))?,
        }
    }
    for path in drafts.iter().filter(|path| !is_lock(path) && !living.contains(path)) {
        files::remove_directory(path)?;
    }
    Ok(())
}
