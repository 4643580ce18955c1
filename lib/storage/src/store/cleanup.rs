//! Removes things from the store: looks at all of it, asks the plan, does what it says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::error::Error;
use super::layout::Layout;
use super::lock::{StoreLock, entries, leased};
use super::records::{self, ImageRecord, NameRecord};
use super::{PruneScope, Removal, Removed, Store, disks, pins, stored};
use crate::blob::digest::Digest;
use crate::blob::write_error;
use crate::disk::remove_leftovers;
use crate::gc::{self, Goal, ListedDisk, ListedImage, Listing, Plan};
use crate::snapshots::{self, Interrupted};

/// Everything in the store, seen under its lock.
struct Seen {
    images: Vec<ImageRecord>,
    names: Vec<NameRecord>,
    listing: Listing,
}

pub(super) fn remove(store: &Store, text: &str, removal: Removal) -> Result<Removed, Error> {
    let removing = StoreLock::exclusive(&store.layout)?;
    let (name, image) = stored::find(store, text)?;
    let mut seen = look(store, &removing)?;
    let others = seen.names.iter().any(|record| record.image == image && Some(&record.name) != name.as_ref());
    if let (Some(name), true, Removal::Careful) = (&name, others, removal) {
        records::remove(&store.layout.name(name))?;
        return Ok(Removed { names: vec![name.clone()], ..Removed::default() });
    }
    let owners = pin_owners(store, &seen, &image, removal)?;
    if !owners.is_empty() {
        return Err(Error::InUse { image, owners });
    }
    // An operation that still looks at the image has it open; only pins may keep it.
    seen.listing.held.remove(&image);
    let plan = gc::plan(&seen.listing, &Goal::Without { image });
    apply(store, &seen, plan, &removing)
}

/// Who keeps an image from being removed.
fn pin_owners(store: &Store, seen: &Seen, image: &Digest, removal: Removal) -> Result<Vec<String>, Error> {
    let disk = seen.listing.images.iter().find(|listed| listed.digest == *image).map(|listed| listed.disk);
    let counts = |key: &Digest| match removal {
        Removal::Careful => key == image || Some(*key) == disk,
        Removal::Forced => key == image,
    };
    let pins = pins::list(&store.layout)?.into_iter();
    Ok(pins
        .filter(|pin| counts(&pin.key))
        .map(|pin| pin.owner)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect())
}

pub(super) fn prune(store: &Store, scope: PruneScope) -> Result<Removed, Error> {
    let removing = StoreLock::exclusive(&store.layout)?;
    sweep_files(store, Interrupted::Removed, &removing)?;
    let seen = look(store, &removing)?;
    let goal = match scope {
        PruneScope::Unnamed => Goal::Unnamed,
        PruneScope::Unused => Goal::Unused,
    };
    let plan = gc::plan(&seen.listing, &goal);
    apply(store, &seen, plan, &removing)
}

/// Brings the store below its size limit. It is no failure of the operation before if this fails.
pub(crate) fn fit(store: &Store) {
    let Some(limit) = store.options.size_limit else { return };
    let fitted = (|| {
        let removing = StoreLock::exclusive(&store.layout)?;
        let seen = look(store, &removing)?;
        apply(store, &seen, gc::plan(&seen.listing, &Goal::Fit { limit }), &removing)
    })();
    match fitted {
        Ok(removed) if removed != Removed::default() => {
            tracing::info!(bytes = removed.bytes, limit, "the store was above its size limit");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "the store could not be brought below its size limit"),
    }
}

/// Removes what operations that were killed left behind. A store that others are using is swept another time.
pub(super) fn sweep(store: &Store) -> Result<(), Error> {
    let Some(removing) = StoreLock::try_exclusive(&store.layout)? else { return Ok(()) };
    sweep_files(store, Interrupted::Kept(SystemTime::now()), &removing)
}

fn sweep_files(store: &Store, arrivals: Interrupted, removing: &StoreLock) -> Result<(), Error> {
    store.blobs.sweep()?;
    leased(&store.layout, removing)?;
    snapshots::sweep(&store.layout, arrivals, removing)?;
    let disks = store.layout.disks();
    let is_lock = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "lock");
    let locks: Vec<PathBuf> = entries(&disks)?.into_iter().filter(is_lock).collect();
    remove_leftovers(&disks).map_err(|source| write_error(&disks, source))?;
    for path in locks.into_iter().filter(|path| is_free(path)) {
        fs::remove_file(&path).map_err(|source| write_error(&path, source))?;
    }
    Ok(())
}

/// Whether no living process has this file locked.
fn is_free(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

fn look(store: &Store, removing: &StoreLock) -> Result<Seen, Error> {
    let layout = &store.layout;
    let names = records::names(layout)?;
    let named: BTreeSet<Digest> = names.iter().map(|record| record.image).collect();
    let images = records::images(layout)?;
    let mut held: BTreeSet<Digest> = leased(layout, removing)?.into_iter().collect();
    held.extend(pins::list(layout)?.into_iter().map(|pin| pin.key));
    held.extend(snapshots::put_away(layout)?);
    let listed_images: Vec<ListedImage> = images
        .iter()
        .map(|record| ListedImage {
            digest: record.digest,
            is_named: named.contains(&record.digest),
            blobs: record.blobs().map(|(blob, _)| blob).collect(),
            disk: disks::key(store, record, &[]),
            last_used: records::last_used(layout, &record.digest).unwrap_or(record.stored_at()),
        })
        .collect();
    // Who runs on the disk wants to find its image again.
    let of_held_disks = listed_images.iter().filter(|image| held.contains(&image.disk));
    let of_held_disks: Vec<Digest> = of_held_disks.map(|image| image.digest).collect();
    held.extend(of_held_disks);
    let listing = Listing {
        images: listed_images,
        disks: listed_disks(store)?,
        snapshots: snapshots::listed(layout)?,
        blobs: store.blobs.list()?.into_iter().collect::<BTreeMap<_, _>>(),
        held,
    };
    Ok(Seen { images, names, listing })
}

fn listed_disks(store: &Store) -> Result<Vec<ListedDisk>, Error> {
    let mut found = Vec::new();
    for path in entries(&store.layout.disks())? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(key) = name.strip_suffix(".ext4").and_then(|hex| Digest::from_hex(hex).ok()) else {
            continue;
        };
        let Some(bytes) = disks::occupied(store, &key) else { continue };
        let made = fs::metadata(&path).and_then(|metadata| metadata.modified());
        let last_used = match records::last_used(&store.layout, &key) {
            Some(time) => time,
            None => made.map_err(|source| Error::Read { path, source })?,
        };
        found.push(ListedDisk { key, bytes, last_used });
    }
    Ok(found)
}

/// Names go before images and images before blobs, each made to last: after a crash or a power failure at any point,
/// every record that is left has all its blobs.
fn apply(store: &Store, seen: &Seen, plan: Plan, removing: &StoreLock) -> Result<Removed, Error> {
    let layout = &store.layout;
    let known: BTreeSet<Digest> = seen.images.iter().map(|record| record.digest).collect();
    let leads_nowhere =
        |record: &&NameRecord| plan.images.contains(&record.image) || !known.contains(&record.image);
    let mut removed = Removed { bytes: plan.bytes, ..Removed::default() };
    for record in seen.names.iter().filter(leads_nowhere) {
        records::remove(&layout.name(&record.name))?;
        removed.names.push(record.name.clone());
    }
    for image in plan.images {
        records::remove(&layout.image(&image))?;
        forget_use(layout, &image)?;
        removed.images.push(image);
    }
    for snapshot in plan.snapshots {
        snapshots::take(layout, &snapshot, removing)?;
        removed.snapshots.push(snapshot);
    }
    for disk in plan.disks {
        records::remove(&layout.disk(&disk))?;
        forget_use(layout, &disk)?;
        removed.disks.push(disk);
    }
    plan.blobs.iter().try_for_each(|blob| store.blobs.remove(blob))?;
    Ok(removed)
}

fn forget_use(layout: &Layout, digest: &Digest) -> Result<(), Error> {
    let path = layout.used(digest);
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(write_error(&path, source).into()),
        _ => Ok(()),
    }
}
