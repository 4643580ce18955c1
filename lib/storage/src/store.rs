//! The store of one machine: images and the disks made of them, and snapshots of VMs. Pulls, imports, lists, builds disks, pins
//! and forgets. Safe for many processes at once.

pub(crate) mod cleanup;
pub(crate) mod disks;
mod error;
pub(crate) mod layout;
pub(crate) mod lock;
pub(crate) mod pins;
mod pull;
pub(crate) mod records;
mod stored;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

pub use error::Error;
use layout::Layout;
use lock::Lease;

use crate::blob::BlobStore;

use crate::blob::digest::Digest;
use crate::image::base::LayerSource;
use crate::image::config::ImageConfig;
use crate::image::platform::Platform;
use crate::image::reference::{Archive, Reference};
use crate::image::registry::settings::RegistrySettings;
use crate::progress::Progress;
use crate::snapshots::Snapshots;

/// The layout that this version reads and writes.
const FORMAT: &str = "1";

/// How a store behaves. The default has no size limit and pulls for this machine's platform.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Bytes on disk above which the least recently used images, disks and snapshots go; None keeps everything.
    pub size_limit: Option<u64>,
    pub platform: Platform,
    pub registries: RegistrySettings,
    /// VMMs that open a snapshot's memory for writing, though they never write to it. The kernel would refuse that of a sealed
    /// file, so their snapshots are pinned only.
    pub never_sealed: Vec<String>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            size_limit: None,
            platform: Platform::host(),
            registries: RegistrySettings::default(),
            never_sealed: vec!["qemu".to_owned()],
        }
    }
}

/// When a registry is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullPolicy {
    Always,
    /// Only if the image is not in the store.
    Missing,
    Never,
}

/// An image in the store; while this value lives, nothing of the image is evicted.
#[derive(Debug, Clone)]
pub struct Image {
    /// Of the manifest.
    pub digest: Digest,
    #[expect(dead_code, reason = "keeps the image while this value lives")]
    lease: Arc<Lease>,
}

/// A line of `imp image ls`.
#[derive(Debug, Clone)]
pub struct ImageSummary {
    /// Digest of the manifest.
    pub digest: Digest,
    /// The names that mean this image; none for an image that lost its name to a newer one.
    pub names: Vec<Reference>,
    /// Bytes of its blobs, as compressed as they came.
    pub size: u64,
    /// Bytes on disk of the disks built from it.
    pub disk_size: u64,
    /// When it was built, as the image says.
    pub created: Option<String>,
    pub stored: SystemTime,
    pub last_used: SystemTime,
    pub platform: Platform,
    pub pinned_by: Vec<String>,
}

/// A read-only ext4 image of all layers; while this value lives, it is not evicted.
#[derive(Debug)]
pub struct BaseDisk {
    pub path: PathBuf,
    pub key: Digest,
    /// Bytes the guest sees; the file may be sparse.
    pub size: u64,
    #[expect(dead_code, reason = "keeps the disk while this value lives")]
    lease: Arc<Lease>,
}

/// What a clean-up removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    pub images: Vec<Digest>,
    pub disks: Vec<Digest>,
    pub snapshots: Vec<Digest>,
    pub names: Vec<Reference>,
    /// Bytes on disk that became free.
    pub bytes: u64,
}

/// Whether an image that has other names, or is pinned, goes anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Of several names takes only the one given; refuses an image that is pinned, or whose disk is.
    Careful,
    /// Takes all names. A pinned disk stays until its pin is gone; a pinned image is still refused.
    Forced,
}

/// What `prune` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PruneScope {
    /// What no name leads to.
    Unnamed,
    /// Everything that is not pinned or in use.
    Unused,
}

/// Something that must stay, and who says so.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pin {
    pub owner: String,
    /// A base disk's key, an image's digest or a snapshot's.
    pub key: Digest,
}

/// All methods block; from async code call them on a blocking thread.
#[derive(Debug)]
pub struct Store {
    pub(crate) layout: Layout,
    blobs: BlobStore,
    pub(crate) options: StoreOptions,
}

impl Store {
    /// Opens the store in this directory, making it if need be, and removes what crashed operations left.
    pub fn open(root: impl Into<PathBuf>, options: StoreOptions) -> Result<Self, Error> {
        let layout = Layout::new(root.into());
        prepare(&layout)?;
        let blobs = BlobStore::open(layout.blobs(), layout.partial())?;
        let store = Self { layout, blobs, options };
        cleanup::sweep(&store)?;
        Ok(store)
    }

    /// Gets an image by its name; what is already here is not fetched again.
    pub fn pull(
        &self,
        reference: &Reference,
        policy: PullPolicy,
        progress: &dyn Progress,
    ) -> Result<Image, Error> {
        pull::pull(self, reference, policy, progress)
    }

    /// Takes the images of an archive. Each keeps the names that the archive gives it; one that has only a tag is named
    /// after the archive's file.
    pub fn import(&self, archive: &Archive, progress: &dyn Progress) -> Result<Vec<Image>, Error> {
        pull::import(self, archive, progress)
    }

    /// All images, those used last first.
    pub fn images(&self) -> Result<Vec<ImageSummary>, Error> {
        stored::images(self)
    }

    /// Finds an image by name, by digest, or by the start of its hex digest (at least four digits).
    pub fn resolve(&self, text: &str) -> Result<Image, Error> {
        stored::resolve(self, text)
    }

    /// How the image wants to be run.
    pub fn inspect(&self, image: &Image) -> Result<ImageConfig, Error> {
        stored::inspect(self, image)
    }

    /// The disk of an image with further layers on top: found, or built once however many ask for it at the same time.
    pub fn base_disk(
        &self,
        image: &Image,
        extra_layers: &[LayerSource],
        progress: &dyn Progress,
    ) -> Result<BaseDisk, Error> {
        disks::base_disk(self, image, extra_layers, progress)
    }

    /// A base disk by its key, if it is there.
    pub fn disk(&self, key: &Digest) -> Result<Option<BaseDisk>, Error> {
        disks::disk(self, key)
    }

    /// Where the base disk of this key is, whether or not it is there.
    pub fn disk_path(&self, key: &Digest) -> PathBuf {
        self.layout.disk(key)
    }

    /// Snapshots of VMs, in the same directory and below the same size limit.
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots::of(self)
    }

    /// Keeps an image, a disk or a snapshot until the owner takes the pin back. Owners are 1 to 128 letters, digits, `.`, `-` or `_`.
    pub fn pin(&self, key: &Digest, owner: &str) -> Result<(), Error> {
        pins::add(&self.layout, key, owner)
    }

    /// Takes a pin back; it is no error if there is none.
    pub fn unpin(&self, key: &Digest, owner: &str) -> Result<(), Error> {
        pins::remove(&self.layout, key, owner)
    }

    /// Takes all pins of an owner back: for owners that crashed.
    pub fn unpin_all(&self, owner: &str) -> Result<(), Error> {
        let own = pins::list(&self.layout)?.into_iter().filter(|pin| pin.owner == owner);
        own.into_iter().try_for_each(|pin| pins::remove(&self.layout, &pin.key, owner))
    }

    pub fn pins(&self) -> Result<Vec<Pin>, Error> {
        pins::list(&self.layout)
    }

    /// Forgets a name, and the image with it if that was its last.
    pub fn remove(&self, text: &str, removal: Removal) -> Result<Removed, Error> {
        cleanup::remove(self, text, removal)
    }

    pub fn prune(&self, scope: PruneScope) -> Result<Removed, Error> {
        cleanup::prune(self, scope)
    }
}

/// Makes the directories of a store.
fn prepare(layout: &Layout) -> Result<(), Error> {
    let path = layout.format();
    let is_known = match fs::read_to_string(&path) {
        Ok(found) if found.trim() == FORMAT => true,
        Ok(found) => {
            let found = found.chars().take(40).collect();
            return Err(Error::Format { path: layout.root().to_owned(), found, known: FORMAT });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(source) => return Err(Error::Open { path, source }),
    };
    // Of a store that is known, too: an earlier version may have made it, which had fewer of them.
    for directory in [layout.root().to_owned()].into_iter().chain(layout.directories()) {
        // Images of private registries are nobody else's business.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(|source| Error::Open { path: directory, source })?;
    }
    if is_known {
        return Ok(());
    }
    // The format comes last: a store that has it has everything.
    let partial = layout.partial().join(format!("format-{:016x}", fastrand::u64(..)));
    let written = fs::write(&partial, FORMAT).and_then(|()| fs::rename(&partial, &path));
    written.map_err(|source| Error::Open { path, source })
}

#[cfg(test)]
#[path = "store/store_tests.rs"]
mod tests;
