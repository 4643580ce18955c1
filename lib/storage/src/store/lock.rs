//! Who may use, who may remove: the store's lock, and leases on what a living operation uses.
//!
//! The lock is held for moments, never during a download or a build. A lease lasts as long as its operation: a file that
//! is locked while its process lives, and lists what the process uses. Whoever removes things takes the lock
//! exclusively and reads all leases, so between "it is there" and "I use it" nothing can vanish.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::Error;
use super::layout::Layout;
use crate::blob::digest::Digest;
use crate::blob::write_error;

/// Most of a lease that is read, bytes.
const LARGEST_LEASE: u64 = 1 << 20;

/// The store's lock, until it is dropped.
#[derive(Debug)]
pub(crate) struct StoreLock(#[expect(dead_code, reason = "held for its lock")] File);

impl StoreLock {
    pub(crate) fn shared(layout: &Layout) -> Result<Self, Error> {
        let (file, path) = open(layout)?;
        file.lock_shared().map_err(|source| Error::Lock { path, source })?;
        Ok(Self(file))
    }

    pub(crate) fn exclusive(layout: &Layout) -> Result<Self, Error> {
        let (file, path) = open(layout)?;
        file.lock().map_err(|source| Error::Lock { path, source })?;
        Ok(Self(file))
    }

    /// None if someone else has it.
    pub(crate) fn try_exclusive(layout: &Layout) -> Result<Option<Self>, Error> {
        let (file, path) = open(layout)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(Error::Lock { path, source }),
        }
    }
}

fn open(layout: &Layout) -> Result<(File, PathBuf), Error> {
    let path = layout.lock();
    match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
        Ok(file) => Ok((file, path)),
        Err(source) => Err(Error::Lock { path, source }),
    }
}

/// Keeps images, disks, snapshots and blobs in the store while it lives.
#[derive(Debug)]
pub(crate) struct Lease {
    file: File,
    path: PathBuf,
    layout: Layout,
}

impl Lease {
    /// A lease on these digests, whether or not they are in the store yet: look for them after this, not before.
    pub(crate) fn on(layout: &Layout, digests: &[Digest]) -> Result<Arc<Self>, Error> {
        let _using = StoreLock::shared(layout)?;
        let (file, path) = loop {
            let path = layout.leases().join(format!("{}-{:016x}", std::process::id(), fastrand::u64(..)));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(write_error(&path, source).into()),
            }
        };
        file.lock().map_err(|source| Error::Lock { path: path.clone(), source })?;
        let lease = Self { file, path, layout: layout.clone() };
        lease.add(digests)?;
        Ok(Arc::new(lease))
    }

    /// Holds more.
    pub(crate) fn hold(&self, digests: &[Digest]) -> Result<(), Error> {
        let _using = StoreLock::shared(&self.layout)?;
        self.add(digests)
    }

    fn add(&self, digests: &[Digest]) -> Result<(), Error> {
        let lines: String = digests.iter().map(|digest| format!("{}\n", digest.hex())).collect();
        (&self.file)
            .write_all(lines.as_bytes())
            .map_err(|source| Error::Blob(write_error(&self.path, source)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A lease that stays behind is no longer locked and goes with the next sweep.
        let _ = fs::remove_file(&self.path);
    }
}

/// What the leases of living operations hold; those of dead ones are removed. The caller has the lock exclusively.
pub(crate) fn leased(layout: &Layout, _removing: &StoreLock) -> Result<Vec<Digest>, Error> {
    let mut held = Vec::new();
    for path in entries(&layout.leases())? {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::Read { path, source }),
        };
        match file.try_lock_shared() {
            Ok(()) => {
                let _ = fs::remove_file(&path);
            }
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let read = file.take(LARGEST_LEASE).read_to_string(&mut text);
                read.map_err(|source| Error::Read { path: path.clone(), source })?;
                held.extend(text.lines().filter_map(|line| Digest::from_hex(line).ok()));
            }
            Err(TryLockError::Error(source)) => return Err(Error::Lock { path, source }),
        }
    }
    Ok(held)
}

/// The paths in a directory of the store.
pub(crate) fn entries(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = |source| Error::Read { path: directory.to_owned(), source };
    let entries = fs::read_dir(directory).map_err(read)?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(read)).collect()
}
