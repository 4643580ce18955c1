//! Blobs: content that is addressed by its digest, written once and never changed.
//!
//! A blob is written to `partial/<hex>`, hashed on the way, synced, and only then renamed to `blobs/sha256/<hex>`, after
//! which its directory is synced. So a name under `blobs` always has its whole content, also after a power failure, and
//! whoever records that an image is complete may rely on it. A `partial` file is locked by its writer for as long as it
//! exists: that lock is what makes one download out of many, in this process and in others, and what tells the file of a
//! living writer from a leftover.

pub mod digest;
pub mod partial;

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use digest::{Digest, Hasher};
pub use partial::{Begin, Partial};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the disk that holds {path} is full; free space there (imp image prune) and try again")]
    DiskFull {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("blob {expected}: the content that came has digest {found}; it was thrown away")]
    WrongDigest { expected: Digest, found: Digest },
    #[error("blob {digest}: {found} bytes came and then nothing, {expected} were promised")]
    Truncated { digest: Digest, expected: u64, found: u64 },
    #[error("blob {digest}: more than the promised {expected} bytes came; it was thrown away")]
    Oversize { digest: Digest, expected: u64 },
    #[error("blob {digest} in the store is damaged; remove the image and pull it again")]
    Damaged { digest: Digest },
    #[error("blob {digest} has {size} bytes, more than the {limit} allowed for such a document")]
    TooLarge { digest: Digest, size: u64, limit: u64 },
}

/// Sorts a failed write by what the user can do about it.
pub(crate) fn write_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::DiskFull { path, source },
        _ => Error::Write { path, source },
    }
}

/// The blobs below one directory.
#[derive(Debug, Clone)]
pub struct BlobStore {
    blobs: PathBuf,
    partial: PathBuf,
}

impl BlobStore {
    /// Uses two directories of one file system, making them if need be.
    pub fn open(blobs: PathBuf, partial: PathBuf) -> Result<Self, Error> {
        for directory in [&blobs, &partial] {
            fs::create_dir_all(directory).map_err(|source| write_error(directory, source))?;
        }
        Ok(Self { blobs, partial })
    }

    /// Where a blob is, if it is in the store.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs.join(digest.hex())
    }

    /// Bytes of a blob; None if it is not in the store.
    pub fn size(&self, digest: &Digest) -> Result<Option<u64>, Error> {
        let path = self.path(digest);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { path, source }),
        }
    }

    /// Reads a small blob whole and verifies it once more: disks do rot, and such documents decide what runs.
    pub fn read(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Error> {
        let path = self.path(digest);
        let read = |source| Error::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        if size > limit {
            return Err(Error::TooLarge { digest: *digest, size, limit });
        }
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes).map_err(read)?;
        if Digest::of(&bytes) == *digest { Ok(bytes) } else { Err(Error::Damaged { digest: *digest }) }
    }

    /// Whether a blob still is what its name says; one that is not there is.
    pub fn is_whole(&self, digest: &Digest) -> Result<bool, Error> {
        let path = self.path(digest);
        let read = |source| Error::Read { path: path.clone(), source };
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(source) => return Err(read(source)),
        };
        let mut hasher = Hasher::default();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece).map_err(read)? {
                0 => return Ok(hasher.finish() == *digest),
                count => hasher.update(piece.get(..count).unwrap_or_default()),
            }
        }
    }

    /// Begins to write a blob, unless it is there or someone else is writing it.
    pub fn begin(&self, digest: &Digest, size: u64) -> Result<Begin, Error> {
        partial::begin(self, digest, size)
    }

    /// Stores bytes that are at hand.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest, Error> {
        let digest = Digest::of(bytes);
        if self.size(&digest)? == Some(bytes.len() as u64) {
            return Ok(digest);
        }
        let partial = Partial::wait(self, &digest, bytes.len() as u64)?;
        if let Some(mut partial) = partial {
            partial.write(bytes)?;
            partial.finish()?;
        }
        Ok(digest)
    }

    /// Every blob in the store with its size on disk.
    pub fn list(&self) -> Result<Vec<(Digest, u64)>, Error> {
        let read = |source| Error::Read { path: self.blobs.clone(), source };
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.blobs).map_err(read)? {
            let entry = entry.map_err(read)?;
            let Some(digest) = entry.file_name().to_str().and_then(|name| Digest::from_hex(name).ok()) else {
                continue;
            };
            match entry.metadata() {
                Ok(metadata) => found.push((digest, metadata.len())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(read(source)),
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes a blob; it is no error if there is none.
    pub fn remove(&self, digest: &Digest) -> Result<(), Error> {
        let path = self.path(digest);
        match fs::remove_file(&path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(write_error(&path, source)),
        }
    }

    /// Removes what writers that were killed left behind; returns how many files that were.
    pub fn sweep(&self) -> Result<usize, Error> {
        partial::sweep(&self.partial)
    }
}

#[cfg(test)]
#[path = "blob_tests.rs"]
mod tests;
