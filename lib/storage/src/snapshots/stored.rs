//! What snapshots are in the store: lists them, finds them, opens them.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::manifest::{self, Manifest, Part};
use super::mismatch::{Host, Mismatch, check};
use super::{Snapshot, Summary, files, verified};
use crate::blob::digest::Digest;
use crate::store::layout::Layout;
use crate::store::lock::{Lease, StoreLock, entries};
use crate::store::{Store, pins, records};

/// Hex digits that a short digest has at least.
const SHORTEST: usize = 4;

/// What was made of the things that a template's digest stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TemplateRecord {
    pub(super) template: Digest,
    pub(super) snapshot: Digest,
}

pub(super) fn find(layout: &Layout, template: &Digest) -> Result<Option<Digest>, Error> {
    let record: Option<TemplateRecord> = records::read(&layout.template(template))?;
    let known = record.filter(|record| record.template == *template).map(|record| record.snapshot);
    Ok(known.filter(|snapshot| layout.snapshot(snapshot).exists()))
}

pub(super) fn name(layout: &Layout, template: &Digest, snapshot: &Digest) -> Result<(), Error> {
    let record = TemplateRecord { template: *template, snapshot: *snapshot };
    let using = StoreLock::shared(layout)?;
    if !layout.snapshot(snapshot).exists() {
        return Err(Error::NoSnapshot(snapshot.to_string()));
    }
    Ok(records::write(layout, &layout.template(template), &record, &using)?)
}

pub(super) fn forget(layout: &Layout, template: &Digest) -> Result<(), Error> {
    let _using = StoreLock::shared(layout)?;
    Ok(records::remove(&layout.template(template))?)
}

pub(super) fn templates(layout: &Layout) -> Result<Vec<TemplateRecord>, Error> {
    Ok(records::all(&layout.templates())?)
}

pub(super) fn open(store: &Store, digest: &Digest, host: &Host) -> Result<Snapshot, Error> {
    let layout = &store.layout;
    let snapshot = held(layout, digest)?;
    let refused = |reason| Error::Refused { snapshot: *digest, reason };
    check(&snapshot.manifest.description, host).map_err(refused)?;
    verified::verify(layout, digest, &snapshot.manifest, &store.options.never_sealed)?;
    records::touch(layout, digest, SystemTime::now())?;
    Ok(snapshot)
}

/// A snapshot whose files nobody has looked at, with a lease on it and its base disk.
pub(super) fn held(layout: &Layout, digest: &Digest) -> Result<Snapshot, Error> {
    let lease = Lease::on(layout, &[*digest])?;
    let manifest = manifest(layout, digest)?;
    lease.hold(&[manifest.description.base])?;
    Ok(Snapshot::new(layout, *digest, manifest, lease))
}

pub(super) fn manifest(layout: &Layout, digest: &Digest) -> Result<Manifest, Error> {
    manifest_with_bytes(layout, digest).map(|(manifest, _)| manifest)
}

/// The manifest, and its bytes as they are stored.
pub(super) fn manifest_with_bytes(layout: &Layout, digest: &Digest) -> Result<(Manifest, Vec<u8>), Error> {
    let refused = |reason| Error::Refused { snapshot: *digest, reason };
    let path = files::manifest(&layout.snapshot(digest));
    let size = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::NoSnapshot(digest.to_string()));
        }
        Err(source) => return Err(Error::Read { path, source }),
    };
    if size > manifest::LARGEST {
        return Err(refused(Mismatch::DamagedManifest));
    }
    let bytes = fs::read(&path).map_err(|source| Error::Read { path, source })?;
    if Digest::of(&bytes) != *digest {
        return Err(refused(Mismatch::DamagedManifest));
    }
    let parsed = Manifest::parse(&bytes).map_err(|error| match error {
        manifest::Error::Format { found } => refused(Mismatch::Format { found }),
        _ => refused(Mismatch::DamagedManifest),
    });
    Ok((parsed?, bytes))
}

/// All digests of snapshots in the store.
pub(super) fn digests(layout: &Layout) -> Result<Vec<Digest>, Error> {
    let paths = entries(&layout.snapshots())?;
    let mut found: Vec<Digest> =
        paths.iter().filter_map(|path| Digest::from_hex(path.file_name()?.to_str()?).ok()).collect();
    found.sort();
    Ok(found)
}

pub(super) fn resolve(layout: &Layout, text: &str) -> Result<Digest, Error> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    let shown = || text.chars().take(100).collect();
    if hex.len() < SHORTEST {
        return Err(Error::NoSnapshot(shown()));
    }
    let candidates: Vec<Digest> =
        digests(layout)?.into_iter().filter(|digest| digest.hex().starts_with(hex)).collect();
    match candidates.as_slice() {
        [] => Err(Error::NoSnapshot(shown())),
        [one] => Ok(*one),
        _ => Err(Error::Ambiguous { text: shown(), candidates }),
    }
}

pub(super) fn list(layout: &Layout) -> Result<Vec<Summary>, Error> {
    let (templates, pins) = (templates(layout)?, pins::list(layout)?);
    // One that is kept for itself was made of what nobody here knows.
    let leads = |record: &&TemplateRecord| record.template != record.snapshot;
    let mut found = Vec::new();
    for digest in digests(layout)? {
        // One that is damaged, or just goes, is no reason not to list the others.
        let Ok(manifest) = manifest(layout, &digest) else { continue };
        let directory = layout.snapshot(&digest);
        let made = fs::metadata(files::manifest(&directory)).and_then(|data| data.modified());
        let made = made.unwrap_or(SystemTime::UNIX_EPOCH);
        let is_sealed = verified::record(layout, &digest)?.is_some_and(|record| record.is_sealed());
        let of_this = templates.iter().filter(leads).filter(|record| record.snapshot == digest);
        found.push(Summary {
            digest,
            manifest,
            templates: of_this.map(|record| record.template).collect(),
            bytes: occupied(&directory),
            made,
            last_used: records::last_used(layout, &digest).unwrap_or(made),
            pinned_by: pins.iter().filter(|pin| pin.key == digest).map(|pin| pin.owner.clone()).collect(),
            is_sealed,
        });
    }
    found.sort_by_key(|summary| (std::cmp::Reverse(summary.last_used), summary.digest));
    Ok(found)
}

/// Bytes on disk of a snapshot's files.
pub(super) fn occupied(directory: &Path) -> u64 {
    let index = |part| files::index(directory, part);
    let files = Part::ALL.into_iter().flat_map(|part| [files::part(directory, part), index(part)]);
    files.filter_map(|path| fs::metadata(path).ok()).map(|data| data.blocks() * 512).sum()
}
