//! How snapshots go: one that is asked for, those that the collection chooses, and what killed processes left.
//!
//! ```text
//! the names that lead to it ─► its directory, renamed among the drafts ─► its record ─► its files
//! ```

use std::fs;
use std::io;

use super::arriving::{self, Interrupted};
use super::error::{Error, write_error};
use super::manifest::Kind;
use super::{draft, files, stored, verified};
use crate::blob::digest::Digest;
use crate::blob::partial::sync_parent;
use crate::gc::ListedSnapshot;
use crate::store::layout::Layout;
use crate::store::lock::{StoreLock, entries, leased};
use crate::store::{Store, pins, records};

pub(super) fn remove(store: &Store, digest: &Digest) -> Result<u64, Error> {
    let layout = &store.layout;
    let removing = StoreLock::exclusive(layout)?;
    if !layout.snapshot(digest).exists() {
        return Err(Error::NoSnapshot(digest.to_string()));
    }
    let mut owners: Vec<String> =
        pins::list(layout)?.into_iter().filter(|pin| pin.key == *digest).map(|pin| pin.owner).collect();
    if leased(layout, &removing)?.contains(digest) {
        owners.push("an operation that has not ended".to_owned());
    }
    if !owners.is_empty() {
        return Err(Error::InUse { snapshot: *digest, owners });
    }
    let bytes = stored::occupied(&layout.snapshot(digest));
    take(layout, digest, &removing)?;
    Ok(bytes)
}

/// Removes a snapshot, whoever uses it.
pub(crate) fn take(layout: &Layout, digest: &Digest, _removing: &StoreLock) -> Result<(), Error> {
    for record in stored::templates(layout)?.iter().filter(|record| record.snapshot == *digest) {
        records::remove(&layout.template(&record.template))?;
    }
    let directory = layout.snapshot(digest);
    let gone = layout.drafts().join(format!("gone-{}-{:016x}", digest.hex(), fastrand::u64(..)));
    match fs::rename(&directory, &gone) {
        Ok(()) => sync_parent(&directory)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(write_error(&directory, source)),
    }
    for path in [layout.verified(digest), layout.used(digest)] {
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(write_error(&path, source));
            }
            _ => {}
        }
    }
    files::remove_directory(&gone)
}

/// What the collection has to know of snapshots.
pub(crate) fn listed(layout: &Layout) -> Result<Vec<ListedSnapshot>, Error> {
    let templates = stored::templates(layout)?;
    let mut found = Vec::new();
    for digest in stored::digests(layout)? {
        let directory = layout.snapshot(&digest);
        let made = fs::metadata(&directory).and_then(|data| data.modified());
        let last_used = match records::last_used(layout, &digest) {
            Some(last_used) => last_used,
            None => made.map_err(|source| Error::Read { path: directory.clone(), source })?,
        };
        found.push(ListedSnapshot {
            digest,
            is_named: templates.iter().any(|record| record.snapshot == digest),
            bytes: stored::occupied(&directory),
            // One whose manifest cannot be read needs nothing.
            base: stored::manifest(layout, &digest).ok().map(|manifest| manifest.description.base),
            last_used,
        });
    }
    Ok(found)
}

/// VMs that are put away: nothing else has what they are, so only who asks for one by its digest removes it.
pub(crate) fn put_away(layout: &Layout) -> Result<Vec<Digest>, Error> {
    let mut found = stored::digests(layout)?;
    found.retain(|digest| {
        stored::manifest(layout, digest).is_ok_and(|manifest| manifest.description.kind == Kind::Suspend)
    });
    Ok(found)
}

/// Removes what killed processes left, local snapshots of before a restart, and records of what is gone.
pub(crate) fn sweep(layout: &Layout, arrivals: Interrupted, removing: &StoreLock) -> Result<(), Error> {
    draft::sweep(layout, removing)?;
    arriving::sweep(layout, arrivals, removing)?;
    for digest in stored::digests(layout)? {
        let is_local = stored::manifest(layout, &digest).is_ok_and(|manifest| manifest.local.is_some());
        if is_local && verified::is_outlived(layout, &digest)? {
            take(layout, &digest, removing)?;
        }
    }
    for path in entries(&layout.verifications())? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let digest = name.strip_suffix(".json").and_then(|hex| Digest::from_hex(hex).ok());
        if !digest.is_some_and(|digest| layout.snapshot(&digest).exists()) {
            fs::remove_file(&path).map_err(|source| write_error(&path, source))?;
        }
    }
    Ok(())
}
