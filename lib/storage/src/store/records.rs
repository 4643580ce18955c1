//! What the store remembers: complete images, what names mean, and when something was used last.
//!
//! A record is a small JSON file that is written beside its place, synced and renamed, and its directory synced. It is
//! written after all blobs that it names, and removed (and that synced) before any of them.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::Error;
use super::layout::Layout;
use super::lock::{StoreLock, entries};
use crate::blob::digest::Digest;
use crate::blob::partial::sync_parent;
use crate::blob::write_error;
use crate::image::platform::Platform;
use crate::image::reference::Reference;

/// One image, all of whose blobs are in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    /// Of the manifest: the identity of the image.
    pub(crate) digest: Digest,
    pub(crate) manifest_size: u64,
    pub(crate) config: Digest,
    pub(crate) config_size: u64,
    /// Lowest first.
    pub(crate) layers: Vec<LayerRecord>,
    pub(crate) platform: Platform,
    /// As the image says.
    pub(crate) created: Option<String>,
    /// Seconds since 1970.
    pub(crate) stored: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerRecord {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) media_type: String,
    pub(crate) diff_id: Digest,
}

impl ImageRecord {
    pub(crate) fn blobs(&self) -> impl Iterator<Item = (Digest, u64)> {
        let own = [(self.digest, self.manifest_size), (self.config, self.config_size)];
        own.into_iter().chain(self.layers.iter().map(|layer| (layer.digest, layer.size)))
    }

    pub(crate) fn stored_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.stored)
    }
}

/// What a name means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NameRecord {
    pub(crate) name: Reference,
    /// Digest of an [`ImageRecord`].
    pub(crate) image: Digest,
    /// What the registry has under this name: the image, or an index that led to it.
    pub(crate) target: Digest,
}

pub(crate) fn image(layout: &Layout, digest: &Digest) -> Result<Option<ImageRecord>, Error> {
    read(&layout.image(digest))
}

pub(crate) fn name(layout: &Layout, reference: &Reference) -> Result<Option<NameRecord>, Error> {
    Ok(read::<NameRecord>(&layout.name(reference))?.filter(|record| record.name == *reference))
}

pub(crate) fn images(layout: &Layout) -> Result<Vec<ImageRecord>, Error> {
    all(&layout.images())
}

pub(crate) fn names(layout: &Layout) -> Result<Vec<NameRecord>, Error> {
    all(&layout.names())
}

pub(crate) fn write_image(layout: &Layout, record: &ImageRecord, using: &StoreLock) -> Result<(), Error> {
    write(layout, &layout.image(&record.digest), record, using)
}

pub(crate) fn write_name(layout: &Layout, record: &NameRecord, using: &StoreLock) -> Result<(), Error> {
    write(layout, &layout.name(&record.name), record, using)
}

/// Removes a file, and makes that last.
pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Ok(()) => Ok(sync_parent(path)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(write_error(path, source).into()),
    }
}

/// Notes that something is used now. That this lasts through a power failure matters to nobody.
pub(crate) fn touch(layout: &Layout, digest: &Digest, now: SystemTime) -> Result<(), Error> {
    let path = layout.used(digest);
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let touched = file.and_then(|file| file.set_times(FileTimes::new().set_modified(now)));
    touched.map_err(|source| write_error(&path, source).into())
}

/// When something was used last, if that is known.
pub(crate) fn last_used(layout: &Layout, digest: &Digest) -> Option<SystemTime> {
    fs::metadata(layout.used(digest)).and_then(|metadata| metadata.modified()).ok()
}

pub(crate) fn all<T: DeserializeOwned>(directory: &Path) -> Result<Vec<T>, Error> {
    let mut found = Vec::new();
    for path in entries(directory)? {
        found.extend(read(&path)?);
    }
    Ok(found)
}

/// A record that is damaged counts as missing: what it describes is then fetched again.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)
            .inspect_err(
                |error| tracing::warn!(path = %path.display(), %error, "a damaged record is ignored"),
            )
            .ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

/// Whether a record is still there after a power failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lasting {
    Yes,
    UntilCrash,
}

pub(crate) fn write<T: Serialize>(
    layout: &Layout,
    path: &Path,
    record: &T,
    using: &StoreLock,
) -> Result<(), Error> {
    write_as(layout, path, record, Lasting::Yes, using)
}

pub(crate) fn write_as<T: Serialize>(
    layout: &Layout,
    path: &Path,
    record: &T,
    lasting: Lasting,
    _using: &StoreLock,
) -> Result<(), Error> {
    let partial = layout.partial().join(format!("record-{}-{:016x}", std::process::id(), fastrand::u64(..)));
    let written = serde_json::to_vec(record).map_err(io::Error::other).and_then(|bytes| {
        let mut file = File::create_new(&partial)?;
        file.write_all(&bytes)?;
        if lasting == Lasting::Yes {
            file.sync_all()?;
        }
        fs::rename(&partial, path)
    });
    if let Err(source) = written {
        let _ = fs::remove_file(&partial);
        return Err(write_error(path, source).into());
    }
    if lasting == Lasting::Yes {
        sync_parent(path)?;
    }
    Ok(())
}
