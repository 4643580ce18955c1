//! How images get into the store: from a registry or from an archive, complete or not at all.
//!
//! ```text
//! lease on all blobs ─► blobs, each verified and synced ─► image record ─► disk ─► name record ─► size limit
//! ```

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::Error;
use super::lock::{Lease, StoreLock};
use super::records::{self, ImageRecord, LayerRecord, NameRecord};
use super::{Image, PullPolicy, Store, cleanup, disks, stored};
use crate::blob::digest::Digest;
use crate::image::archive::{self, Opened};
use crate::image::config::{self, ImageConfig};
use crate::image::manifest::Manifest;
use crate::image::reference::{Archive, Reference};
use crate::image::registry::{self, Found, Pull};
use crate::progress::{Event, Progress};

pub(super) fn pull(
    store: &Store,
    reference: &Reference,
    policy: PullPolicy,
    progress: &dyn Progress,
) -> Result<Image, Error> {
    let present = match policy {
        PullPolicy::Always => None,
        PullPolicy::Missing | PullPolicy::Never => present(store, reference)?,
    };
    match (present, policy) {
        (Some(image), _) => Ok(image),
        (None, PullPolicy::Never) => Err(Error::NotPresent { reference: reference.clone() }),
        (None, PullPolicy::Always | PullPolicy::Missing) => {
            // A thread of its own, because the caller's may be one that runs async code.
            let pulled = std::thread::scope(|scope| scope.spawn(|| fetch(store, reference, progress)).join());
            pulled.unwrap_or_else(|panic| resume_unwind(panic))
        }
    }
}

/// The image that the store has under this name, or under the digest in it.
fn present(store: &Store, reference: &Reference) -> Result<Option<Image>, Error> {
    if let Some(name) = records::name(&store.layout, reference)?
        && let Some(image) = stored::open(store, &name.image)?
    {
        return Ok(Some(image));
    }
    let Some(digest) = reference.digest() else { return Ok(None) };
    let Some(image) = stored::open(store, digest)? else { return Ok(None) };
    let record = NameRecord { name: reference.clone(), image: *digest, target: *digest };
    records::write_name(&store.layout, &record, &StoreLock::shared(&store.layout)?)?;
    Ok(Some(image))
}

fn fetch(store: &Store, reference: &Reference, progress: &dyn Progress) -> Result<Image, Error> {
    let failed = |source: registry::Error| match source {
        registry::Error::Blob(error) => Error::Blob(error),
        source => Error::Pull { reference: reference.clone(), source: Box::new(source) },
    };
    progress.report(Event::Resolving { name: reference.familiar() });
    let pull = Pull::new(reference, &store.options.registries, progress).map_err(failed)?;
    let found = pull.resolve(&store.options.platform).map_err(failed)?;
    let Found { target, ref bytes, ref manifest, .. } = found;
    let arriving = Arriving::new(store, bytes, manifest, progress)?;
    pull.download(&found, &store.blobs).map_err(failed)?;
    let image = arriving.complete(store)?;
    disks::base_disk(store, &image, &[], progress)?;
    name(store, reference, &image, target)?;
    progress.report(Event::Stored { image: image.digest });
    cleanup::fit(store);
    Ok(image)
}

pub(super) fn import(store: &Store, archive: &Archive, progress: &dyn Progress) -> Result<Vec<Image>, Error> {
    let failed = |source: archive::Error| match source {
        archive::Error::Blob(error) => Error::Blob(error),
        source => Error::Import { archive: archive.to_string(), source: Box::new(source) },
    };
    progress.report(Event::Resolving { name: archive.to_string() });
    let opened = Opened::open(archive, &store.layout.partial()).map_err(failed)?;
    let mut images = Vec::new();
    for found in opened.images(&store.options.platform).map_err(failed)? {
        let arriving = Arriving::new(store, &found.bytes, &found.manifest, progress)?;
        for blob in [&found.manifest.config].into_iter().chain(&found.manifest.layers) {
            opened.copy_blob(&found, blob, &store.blobs, progress).map_err(failed)?;
        }
        let image = arriving.complete(store)?;
        disks::base_disk(store, &image, &[], progress)?;
        for reference in &found.names {
            name(store, reference, &image, found.target)?;
        }
        progress.report(Event::Stored { image: image.digest });
        images.push(image);
    }
    cleanup::fit(store);
    Ok(images)
}

/// Gives an image a name, taking it from the image that had it before: one of which VMs can be made, now that this one has a
/// disk, too.
fn name(store: &Store, reference: &Reference, image: &Image, target: Digest) -> Result<(), Error> {
    let record = NameRecord { name: reference.clone(), image: image.digest, target };
    records::write_name(&store.layout, &record, &StoreLock::shared(&store.layout)?)
}

/// An image some of whose blobs may still be missing; nothing of it is removed meanwhile.
struct Arriving<'a> {
    digest: Digest,
    manifest_size: u64,
    manifest: &'a Manifest,
    lease: Arc<Lease>,
}

impl<'a> Arriving<'a> {
    fn new(
        store: &Store,
        bytes: &[u8],
        manifest: &'a Manifest,
        progress: &dyn Progress,
    ) -> Result<Self, Error> {
        let digest = Digest::of(bytes);
        let blobs = [&manifest.config].into_iter().chain(&manifest.layers).map(|blob| blob.digest);
        let lease = Lease::on(&store.layout, &[digest].into_iter().chain(blobs).collect::<Vec<_>>())?;
        let layers = manifest.layers.iter().map(|layer| (layer.digest, layer.size)).collect();
        progress.report(Event::Resolved { image: digest, layers });
        store.blobs.put(bytes)?;
        Ok(Self { digest, manifest_size: bytes.len() as u64, manifest, lease })
    }

    /// Records the image, now that all its blobs are in the store.
    fn complete(self, store: &Store) -> Result<Image, Error> {
        let image = self.digest;
        let config = &self.manifest.config;
        let bytes = store.blobs.read(&config.digest, config::LARGEST)?;
        let parsed = ImageConfig::parse(&bytes).map_err(|source| Error::Config { image, source })?;
        if parsed.diff_ids.len() != self.manifest.layers.len() {
            let (layers, diff_ids) = (self.manifest.layers.len(), parsed.diff_ids.len());
            return Err(Error::LayerCount { image, layers, diff_ids });
        }
        let wanted = store.options.platform.clone().normal();
        if !parsed.platform.architecture.is_empty() && wanted.fitness(&parsed.platform).is_none() {
            let (found, wanted) = (Box::new(parsed.platform), Box::new(wanted));
            return Err(Error::Platform { image, found, wanted });
        }
        let layers = self.manifest.layers.iter().zip(&parsed.diff_ids).map(|(layer, diff_id)| LayerRecord {
            digest: layer.digest,
            size: layer.size,
            media_type: layer.media_type.clone(),
            diff_id: *diff_id,
        });
        let now = SystemTime::now();
        let record = ImageRecord {
            digest: image,
            manifest_size: self.manifest_size,
            config: config.digest,
            config_size: config.size,
            layers: layers.collect(),
            platform: parsed.platform,
            created: parsed.created,
            stored: now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        };
        records::write_image(&store.layout, &record, &StoreLock::shared(&store.layout)?)?;
        records::touch(&store.layout, &image, now)?;
        Ok(Image { digest: image, lease: self.lease })
    }
}
