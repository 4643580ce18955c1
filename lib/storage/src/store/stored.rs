//! What is in the store: lists it, finds things in it, reads them.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::error::Error;
use super::lock::Lease;
use super::{Image, ImageSummary, Store, disks, pins, records};
use crate::blob::digest::Digest;
use crate::image::config::{self, ImageConfig};
use crate::image::reference::Reference;
use records::ImageRecord;

/// Hex digits that a short id has at least.
const SHORTEST_ID: usize = 4;

pub(super) fn images(store: &Store) -> Result<Vec<ImageSummary>, Error> {
    let mut names: BTreeMap<Digest, Vec<Reference>> = BTreeMap::new();
    for record in records::names(&store.layout)? {
        names.entry(record.image).or_default().push(record.name);
    }
    let pins = pins::list(&store.layout)?;
    let mut found = Vec::new();
    for record in records::images(&store.layout)? {
        let disk = disks::key(store, &record, &[]);
        let mut names = names.remove(&record.digest).unwrap_or_default();
        names.sort();
        let mut pinned_by: Vec<String> = pins
            .iter()
            .filter(|pin| pin.key == record.digest || pin.key == disk)
            .map(|pin| pin.owner.clone())
            .collect();
        pinned_by.dedup();
        found.push(ImageSummary {
            digest: record.digest,
            names,
            size: record.blobs().map(|(_, size)| size).sum(),
            disk_size: disks::occupied(store, &disk).unwrap_or(0),
            created: record.created.clone(),
            stored: record.stored_at(),
            last_used: records::last_used(&store.layout, &record.digest).unwrap_or(record.stored_at()),
            platform: record.platform.clone(),
            pinned_by,
        });
    }
    found.sort_by(|a, b| (b.last_used, &b.names, b.digest).cmp(&(a.last_used, &a.names, a.digest)));
    Ok(found)
}

pub(super) fn resolve(store: &Store, text: &str) -> Result<Image, Error> {
    let (_, digest) = find(store, text)?;
    open(store, &digest)?.ok_or_else(|| Error::NoImage(text.to_owned()))
}

/// What a text means: an image, and the name by which it was found, if it was.
pub(super) fn find(store: &Store, text: &str) -> Result<(Option<Reference>, Digest), Error> {
    if let Ok(reference) = text.parse::<Reference>()
        && let Some(record) = records::name(&store.layout, &reference)?
    {
        return Ok((Some(reference), record.image));
    }
    let no_image = || Error::NoImage(text.chars().take(300).collect());
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    if hex.len() < SHORTEST_ID || !hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(no_image());
    }
    let mut candidates: Vec<Digest> = records::images(&store.layout)?
        .iter()
        .map(|record| record.digest)
        .filter(|it| it.hex().starts_with(hex))
        .collect();
    if candidates.is_empty() {
        // The digest of an index is what registries show; it means the image that it led to.
        let names = records::names(&store.layout)?.into_iter();
        candidates.extend(names.filter(|name| name.target.hex().starts_with(hex)).map(|name| name.image));
        candidates.sort();
        candidates.dedup();
    }
    match candidates.as_slice() {
        [] => Err(no_image()),
        [one] => Ok((None, *one)),
        _ => Err(Error::Ambiguous { text: text.to_owned(), candidates }),
    }
}

/// An image with a lease on it; None if it is not in the store with all its blobs.
pub(super) fn open(store: &Store, digest: &Digest) -> Result<Option<Image>, Error> {
    let lease = Lease::on(&store.layout, &[*digest])?;
    let Some(record) = records::image(&store.layout, digest)? else { return Ok(None) };
    for (blob, size) in record.blobs() {
        if store.blobs.size(&blob)? != Some(size) {
            tracing::warn!(%digest, %blob, "an image has lost a blob and is not used");
            return Ok(None);
        }
    }
    records::touch(&store.layout, digest, SystemTime::now())?;
    Ok(Some(Image { digest: *digest, lease }))
}

pub(super) fn record(store: &Store, image: &Image) -> Result<ImageRecord, Error> {
    let found = records::image(&store.layout, &image.digest)?;
    found.ok_or_else(|| Error::NoImage(image.digest.to_string()))
}

pub(super) fn inspect(store: &Store, image: &Image) -> Result<ImageConfig, Error> {
    let record = record(store, image)?;
    let bytes = store.blobs.read(&record.config, config::LARGEST)?;
    ImageConfig::parse(&bytes).map_err(|source| Error::Config { image: image.digest, source })
}
