//! A blob on its way into the store: locked, hashed as it is written, and either complete or gone.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::digest::{Digest, Hasher};
use super::{BlobStore, Error, write_error};

/// What stands in the way of writing a blob.
#[derive(Debug)]
pub enum Begin {
    /// Nothing: it is in the store, with so many bytes.
    Present(u64),
    /// Another writer, who has written so many bytes.
    Busy(u64),
    /// Nothing: write it.
    Started(Box<Partial>),
}

/// The only writer of a blob. Dropped before [`Partial::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Partial {
    file: File,
    path: PathBuf,
    destination: PathBuf,
    digest: Digest,
    size: u64,
    written: u64,
    hasher: Hasher,
    finished: bool,
}

pub(super) fn begin(store: &BlobStore, digest: &Digest, size: u64) -> Result<Begin, Error> {
    let path = store.partial.join(digest.hex());
    loop {
        // One of another size was cut short on the disk, and is written anew.
        if store.size(digest)? == Some(size) {
            return Ok(Begin::Present(size));
        }
        let file = open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Ok(Begin::Busy(file.metadata().map_or(0, |data| data.len())));
            }
            Err(TryLockError::Error(source)) => return Err(write_error(&path, source)),
        }
        // Between opening and locking, the writer before us may have renamed or removed this file.
        if !is_still_named(&file, &path)? {
            continue;
        }
        if store.size(digest)? == Some(size) {
            remove(&path)?;
            return Ok(Begin::Present(size));
        }
        // A file that a killed writer left is used again from its start.
        file.set_len(0).map_err(|source| write_error(&path, source))?;
        return Ok(Begin::Started(Box::new(Partial {
            file,
            path,
            destination: store.path(digest),
            digest: *digest,
            size,
            written: 0,
            hasher: Hasher::default(),
            finished: false,
        })));
    }
}

impl Partial {
    /// Waits until the blob is there (None) or may be written.
    pub fn wait(store: &BlobStore, digest: &Digest, size: u64) -> Result<Option<Self>, Error> {
        loop {
            match begin(store, digest, size)? {
                Begin::Present(_) => return Ok(None),
                Begin::Started(partial) => return Ok(Some(*partial)),
                Begin::Busy(_) => {
                    let path = store.partial.join(digest.hex());
                    let file = open(&path)?;
                    file.lock().map_err(|source| write_error(&path, source))?;
                    // An empty file that nobody wrote is ours to remove; begin() decides about all others.
                    if is_still_named(&file, &path)? && file.metadata().is_ok_and(|data| data.len() == 0) {
                        remove(&path)?;
                    }
                }
            }
        }
    }

    /// Bytes written so far: where a cut download goes on.
    pub fn written(&self) -> u64 {
        self.written
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.written.saturating_add(bytes.len() as u64);
        if written > self.size {
            return Err(Error::Oversize { digest: self.digest, expected: self.size });
        }
        self.file.write_all(bytes).map_err(|source| write_error(&self.path, source))?;
        self.hasher.update(bytes);
        self.written = written;
        Ok(())
    }

    /// Throws away what was written, to begin again.
    pub fn restart(&mut self) -> Result<(), Error> {
        let rewound = self.file.set_len(0).and_then(|()| self.file.rewind());
        rewound.map_err(|source| write_error(&self.path, source))?;
        self.hasher = Hasher::default();
        self.written = 0;
        Ok(())
    }

    /// Verifies size and digest and gives the blob its name, on disk before this returns.
    pub fn finish(mut self) -> Result<(), Error> {
        if self.written < self.size {
            return Err(Error::Truncated { digest: self.digest, expected: self.size, found: self.written });
        }
        let found = std::mem::take(&mut self.hasher).finish();
        if found != self.digest {
            return Err(Error::WrongDigest { expected: self.digest, found });
        }
        self.file.sync_all().map_err(|source| write_error(&self.path, source))?;
        fs::rename(&self.path, &self.destination).map_err(|source| write_error(&self.destination, source))?;
        self.finished = true;
        sync_parent(&self.destination)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.finished {
            // While the lock is held, the name can only be ours. If this fails the next open sweeps it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the unlocked files of a directory of partial files.
pub(super) fn sweep(directory: &Path) -> Result<usize, Error> {
    let read = |source| Error::Read { path: directory.to_owned(), source };
    let mut removed = 0;
    for entry in fs::read_dir(directory).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::Read { path, source }),
        };
        if file.try_lock().is_ok() && is_still_named(&file, &path)? {
            remove(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Makes the names in a file's directory last through a power failure.
pub(crate) fn sync_parent(path: &Path) -> Result<(), Error> {
    let Some(directory) = path.parent() else { return Ok(()) };
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|source| write_error(directory, source))
}

fn open(path: &Path) -> Result<File, Error> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    opened.map_err(|source| write_error(path, source))
}

/// Whether `path` still names this open file.
pub(crate) fn is_still_named(file: &File, path: &Path) -> Result<bool, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    let ours = file.metadata().map_err(read)?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(read(source)),
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(write_error(path, source)),
        _ => Ok(()),
    }
}
