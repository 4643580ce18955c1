//! Base disks: one per set of layers, made once and shared by all.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::error::Error;
use super::lock::{Lease, StoreLock};
use super::records::{self, ImageRecord};
use super::{BaseDisk, Image, Store, cleanup, stored};
use crate::blob::digest::Digest;
use crate::blob::partial::is_still_named;
use crate::blob::write_error;
use crate::image::base::{BaseOptions, LayerSource, Limits, base_key, write_base};
use crate::progress::{Event, Progress};
use crate::snapshots::BaseImage;

pub(super) fn base_disk(
    store: &Store,
    image: &Image,
    extra_layers: &[LayerSource],
    progress: &dyn Progress,
) -> Result<BaseDisk, Error> {
    let record = stored::record(store, image)?;
    let layers = layers(store, &record, extra_layers);
    let key = base_key(&layers);
    let lease = Lease::on(&store.layout, &[image.digest, key])?;
    let path = store.layout.disk(&key);
    let mut was_built = false;
    if !is_there(&path)?
        && let Some(building) = BuildLock::wait(store, &key, progress)?
    {
        lease.hold(&record.blobs().map(|(blob, _)| blob).collect::<Vec<_>>())?;
        if let Err(error) = build(image, &layers, &key, &path, progress) {
            remove_damaged(store, &record);
            return Err(error);
        }
        drop(building);
        was_built = true;
    }
    let size = fs::metadata(&path).map_err(|source| Error::Read { path: path.clone(), source })?.len();
    for used in [&image.digest, &key] {
        records::touch(&store.layout, used, SystemTime::now())?;
    }
    if was_built {
        progress.report(Event::Built { disk: key, bytes: size });
        cleanup::fit(store);
    }
    Ok(BaseDisk { path, key, size, lease })
}

/// The disk of this key, if it is there.
pub(super) fn disk(store: &Store, key: &Digest) -> Result<Option<BaseDisk>, Error> {
    let lease = Lease::on(&store.layout, &[*key])?;
    let path = store.layout.disk(key);
    let size = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Read { path, source }),
    };
    records::touch(&store.layout, key, SystemTime::now())?;
    Ok(Some(BaseDisk { path, key: *key, size, lease }))
}

/// An image of whose layers alone this disk is made, if there is one in the store, with the first of its names.
pub(crate) fn image_of(store: &Store, disk: &Digest) -> Result<Option<BaseImage>, Error> {
    let images = records::images(&store.layout)?;
    let Some(image) = images.iter().find(|image| key(store, image, &[]) == *disk) else { return Ok(None) };
    let names = records::names(&store.layout)?.into_iter().filter(|record| record.image == image.digest);
    Ok(Some(BaseImage { digest: image.digest, name: names.map(|record| record.name).min() }))
}

/// Key of the disk of an image's layers with further ones on top.
pub(super) fn key(store: &Store, record: &ImageRecord, extra_layers: &[LayerSource]) -> Digest {
    base_key(&layers(store, record, extra_layers))
}

/// Bytes on disk of a base disk.
pub(super) fn occupied(store: &Store, key: &Digest) -> Option<u64> {
    fs::metadata(store.layout.disk(key)).ok().map(|metadata| metadata.blocks() * 512)
}

fn layers(store: &Store, record: &ImageRecord, extra_layers: &[LayerSource]) -> Vec<LayerSource> {
    let own = record.layers.iter().map(|layer| LayerSource {
        media_type: layer.media_type.clone(),
        digest: layer.digest,
        diff_id: Some(layer.diff_id),
        path: store.blobs.path(&layer.digest),
    });
    own.chain(extra_layers.iter().cloned()).collect()
}

fn build(
    image: &Image,
    layers: &[LayerSource],
    key: &Digest,
    path: &Path,
    progress: &dyn Progress,
) -> Result<(), Error> {
    let options = BaseOptions { key: *key, limits: Limits::default() };
    let mut report = |at: crate::image::base::BaseProgress| {
        progress.report(Event::Building { disk: *key, bytes: at.bytes_done, total: at.bytes_total });
    };
    let written = write_base(layers, path, &options, &mut report);
    written.map(drop).map_err(|source| Error::Build { image: image.digest, source: Box::new(source) })
}

/// Blobs that are no longer what they were when they were stored: the next pull brings them again.
fn remove_damaged(store: &Store, record: &ImageRecord) {
    for (blob, _) in record.blobs() {
        match store.blobs.is_whole(&blob) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(%blob, "a blob was damaged on this machine's disk and is removed");
                if let Err(error) = store.blobs.remove(&blob) {
                    tracing::warn!(%blob, %error, "a damaged blob stays");
                }
            }
            Err(error) => tracing::warn!(%blob, %error, "a blob cannot be read"),
        }
    }
}

fn is_there(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// The right to build one disk, until it is dropped.
struct BuildLock {
    #[expect(dead_code, reason = "held for its lock")]
    file: File,
    path: PathBuf,
}

impl BuildLock {
    /// Waits until the disk is there (None) or may be built.
    fn wait(store: &Store, key: &Digest, progress: &dyn Progress) -> Result<Option<Self>, Error> {
        let path = store.layout.disk_lock(key);
        loop {
            let file = {
                let _using = StoreLock::shared(&store.layout)?;
                let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
                let file = opened.map_err(|source| write_error(&path, source))?;
                match file.try_lock() {
                    Ok(()) => Ok(file),
                    Err(TryLockError::WouldBlock) => Err(file),
                    Err(TryLockError::Error(source)) => return Err(Error::Lock { path, source }),
                }
            };
            let file = match file {
                Ok(file) => file,
                Err(busy) => {
                    progress.report(Event::Waiting { digest: *key });
                    busy.lock().map_err(|source| Error::Lock { path: path.clone(), source })?;
                    busy
                }
            };
            // Whoever had the lock before may have removed this file.
            if !is_still_named(&file, &path)? {
                if is_there(&store.layout.disk(key))? {
                    return Ok(None);
                }
                continue;
            }
            let lock = Self { file, path };
            return Ok(if is_there(&store.layout.disk(key))? { None } else { Some(lock) });
        }
    }
}

impl Drop for BuildLock {
    fn drop(&mut self) {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(path = %self.path.display(), %error, "a lock file stays until the next sweep");
            }
            _ => {}
        }
    }
}
