//! What goes when the store is too large or is cleaned up. Pure: decides over a listing, removes nothing.
//!
//! What a pin or a living operation holds never goes. Blobs that no image needs (of a pull that failed) go first, then
//! images, disks and snapshots from the least recently used on; of equally old ones the snapshot goes first, then the
//! disk, because they can be made again without a registry. A disk stays as long as a snapshot that was made on it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use crate::blob::digest::Digest;

/// All that is in a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub images: Vec<ListedImage>,
    pub disks: Vec<ListedDisk>,
    pub snapshots: Vec<ListedSnapshot>,
    /// Every blob with its bytes on disk.
    pub blobs: BTreeMap<Digest, u64>,
    /// Digests of images, disks, snapshots and blobs that pins and living operations hold.
    pub held: BTreeSet<Digest>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedImage {
    pub digest: Digest,
    pub is_named: bool,
    /// Its manifest, its configuration and its layers.
    pub blobs: Vec<Digest>,
    /// Key of the disk of exactly its layers.
    pub disk: Digest,
    pub last_used: SystemTime,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDisk {
    pub key: Digest,
    /// Bytes on disk.
    pub bytes: u64,
    pub last_used: SystemTime,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSnapshot {
    pub digest: Digest,
    /// Whether it is what a template's digest leads to.
    pub is_named: bool,
    /// Bytes on disk.
    pub bytes: u64,
    /// Key of the disk that its machine was running on.
    pub base: Option<Digest>,
    pub last_used: SystemTime,
}

/// What a clean-up is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// At most so many bytes on disk.
    Fit { limit: u64 },
    /// Nothing that no name leads to.
    Unnamed,
    /// Nothing that is not held.
    Unused,
    /// Without this image and the disk of its layers.
    Without { image: Digest },
}

/// What to remove, images before snapshots before disks before blobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub images: Vec<Digest>,
    pub snapshots: Vec<Digest>,
    pub disks: Vec<Digest>,
    pub blobs: Vec<Digest>,
    /// Bytes on disk that become free.
    pub bytes: u64,
}

pub fn plan(listing: &Listing, goal: &Goal) -> Plan {
    match goal {
        Goal::Fit { limit } => fit(listing, *limit),
        Goal::Unnamed => {
            let images = removable(listing, |image| !image.is_named);
            let wanted: BTreeSet<Digest> = listing
                .images
                .iter()
                .filter(|image| !images.contains(&image.digest))
                .map(|image| image.disk)
                .collect();
            let snapshots = removable_snapshots(listing, |snapshot| !snapshot.is_named);
            take(listing, images, snapshots, |disk| !wanted.contains(&disk.key))
        }
        Goal::Unused => {
            let snapshots = removable_snapshots(listing, |_| true);
            take(listing, removable(listing, |_| true), snapshots, |_| true)
        }
        Goal::Without { image } => {
            let images = removable(listing, |listed| listed.digest == *image);
            let disk = listing
                .images
                .iter()
                .find(|listed| images.contains(&listed.digest))
                .map(|listed| listed.disk);
            let shared =
                listing.images.iter().any(|listed| listed.digest != *image && Some(listed.disk) == disk);
            take(listing, images, BTreeSet::new(), |listed| Some(listed.key) == disk && !shared)
        }
    }
}

fn removable(listing: &Listing, goes: impl Fn(&ListedImage) -> bool) -> BTreeSet<Digest> {
    let free = listing.images.iter().filter(|image| !listing.held.contains(&image.digest));
    free.filter(|image| goes(image)).map(|image| image.digest).collect()
}

fn removable_snapshots(listing: &Listing, goes: impl Fn(&ListedSnapshot) -> bool) -> BTreeSet<Digest> {
    let free = listing.snapshots.iter().filter(|snapshot| !listing.held.contains(&snapshot.digest));
    free.filter(|snapshot| goes(snapshot)).map(|snapshot| snapshot.digest).collect()
}

/// Removes these images and snapshots, the disks that go and that no snapshot needs, and all blobs that nothing needs then.
fn take(
    listing: &Listing,
    images: BTreeSet<Digest>,
    snapshots: BTreeSet<Digest>,
    disk_goes: impl Fn(&ListedDisk) -> bool,
) -> Plan {
    let (going, staying): (Vec<_>, Vec<_>) =
        listing.snapshots.iter().partition(|snapshot| snapshots.contains(&snapshot.digest));
    let bases: BTreeSet<Digest> = staying.iter().filter_map(|snapshot| snapshot.base).collect();
    let stays = |disk: &ListedDisk| listing.held.contains(&disk.key) || bases.contains(&disk.key);
    let disks: Vec<&ListedDisk> =
        listing.disks.iter().filter(|disk| !stays(disk) && disk_goes(disk)).collect();
    let blobs = unneeded(listing, &images);
    let bytes = disks.iter().map(|disk| disk.bytes).sum::<u64>()
        + going.iter().map(|snapshot| snapshot.bytes).sum::<u64>()
        + blobs.iter().map(|(_, bytes)| bytes).sum::<u64>();
    Plan {
        images: images.into_iter().collect(),
        snapshots: snapshots.into_iter().collect(),
        disks: disks.iter().map(|disk| disk.key).collect(),
        blobs: blobs.into_iter().map(|(blob, _)| blob).collect(),
        bytes,
    }
}

/// The blobs that nothing needs once these images are gone.
fn unneeded(listing: &Listing, gone: &BTreeSet<Digest>) -> Vec<(Digest, u64)> {
    let stay = listing.images.iter().filter(|image| !gone.contains(&image.digest));
    let needed: BTreeSet<Digest> = stay.flat_map(|image| image.blobs.iter().copied()).collect();
    let free =
        listing.blobs.iter().filter(|(blob, _)| !needed.contains(blob) && !listing.held.contains(blob));
    free.map(|(blob, bytes)| (*blob, *bytes)).collect()
}

fn fit(listing: &Listing, limit: u64) -> Plan {
    let total = listing.disks.iter().map(|disk| disk.bytes).sum::<u64>()
        + listing.snapshots.iter().map(|snapshot| snapshot.bytes).sum::<u64>()
        + listing.blobs.values().sum::<u64>();
    let mut gone = Gone::default();
    if total <= limit {
        return Plan::default();
    }
    let mut candidates: Vec<Candidate<'_>> = listing.snapshots.iter().map(Candidate::Snapshot).collect();
    candidates.extend(listing.disks.iter().map(|disk| Candidate::Disk(disk, last_used(listing, disk))));
    candidates.extend(listing.images.iter().map(Candidate::Image));
    candidates.retain(|candidate| !listing.held.contains(candidate.digest()));
    candidates.sort_by_key(|candidate| candidate.order());
    let mut plan = gone.plan(listing);
    for candidate in candidates {
        if total - plan.bytes <= limit {
            break;
        }
        match candidate {
            Candidate::Snapshot(snapshot) => gone.snapshots.insert(snapshot.digest),
            Candidate::Disk(disk, _) => gone.disks.insert(disk.key),
            Candidate::Image(image) => gone.images.insert(image.digest),
        };
        plan = gone.plan(listing);
    }
    plan
}

/// Who uses a snapshot uses the disk below it.
fn last_used(listing: &Listing, disk: &ListedDisk) -> SystemTime {
    let on_it = listing.snapshots.iter().filter(|snapshot| snapshot.base == Some(disk.key));
    on_it.map(|snapshot| snapshot.last_used).fold(disk.last_used, SystemTime::max)
}

#[derive(Default)]
struct Gone {
    images: BTreeSet<Digest>,
    snapshots: BTreeSet<Digest>,
    disks: BTreeSet<Digest>,
}

impl Gone {
    fn plan(&self, listing: &Listing) -> Plan {
        let disk_goes = |disk: &ListedDisk| self.disks.contains(&disk.key);
        take(listing, self.images.clone(), self.snapshots.clone(), disk_goes)
    }
}

enum Candidate<'a> {
    Snapshot(&'a ListedSnapshot),
    /// And when it, or a snapshot on it, was used last.
    Disk(&'a ListedDisk, SystemTime),
    Image(&'a ListedImage),
}

impl Candidate<'_> {
    fn digest(&self) -> &Digest {
        match self {
            Self::Snapshot(snapshot) => &snapshot.digest,
            Self::Disk(disk, _) => &disk.key,
            Self::Image(image) => &image.digest,
        }
    }

    /// The smallest goes first; the digest makes the choice among equals the same every time.
    fn order(&self) -> (SystemTime, u8, Digest) {
        match self {
            Self::Snapshot(snapshot) => (snapshot.last_used, 0, snapshot.digest),
            Self::Disk(disk, last_used) => (*last_used, 1, disk.key),
            Self::Image(image) => (image.last_used, 2, image.digest),
        }
    }
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
