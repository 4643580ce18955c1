//! Snapshots of VMs: memory, VMM state and scratch disk of one machine at one moment, immutable, addressed by a digest.
//!
//! ```text
//! let snapshots = store.snapshots();
//!
//! // Making one: the parts are written into a private directory, which becomes the snapshot or vanishes.
//! let draft = snapshots.draft(bytes_that_will_be_written)?;         // NoRoom, with numbers, if they do not fit
//! machine.snapshot(draft.part(Part::Memory), draft.part(Part::State)); clone_scratch(…, draft.part(Part::Scratch))
//! let snapshot = snapshots.commit(draft, description, Keeping::Durable)?;
//! snapshots.name(&template, &snapshot.digest)?;                     // of a template: what it was made of leads to it
//!
//! // Using one.
//! if let Some(digest) = snapshots.find(&template)? {
//!     let snapshot = snapshots.open(&digest, &host)?;               // Refused { reason: Mismatch } if it does not fit or is damaged
//!     store.pin(&snapshot.digest, vm)?;                             // for as long as the VM maps the memory
//!     restore(snapshot.part(Part::Memory), snapshot.part(Part::State), snapshot.manifest.description.configuration)
//! }
//! ```
//!
//! - A part under its name never changes and is never written to. VMMs map `memory` privately; a scratch disk is cloned.
//! - While a [`Snapshot`] lives, neither it nor its base disk is removed by anybody. What must outlive the process is kept by a
//!   pin (`Store::pin`, `unpin`, `unpin_all`; the base disk needs none: it stays as long as a snapshot on it).
//! - A rebuilt template is a new snapshot beside the old one; only then does its name lead there. The old one stays while
//!   it is pinned, and goes by `prune`, or when the store is above its size limit.
//! - [`Keeping::Durable`] hashes the parts (all processors, holes are not read), frees zeros and syncs.
//!   [`Keeping::UntilRestart`] does nothing of that: for the children of a fork, which do not outlive the machine either.
//! - The parts of a durable snapshot must be closed for writing before `commit` (`StillWritten` otherwise, where the file system
//!   seals files).
//! - All calls block.

mod archive;
mod arriving;
pub mod artifact;
pub mod base;
pub mod chunks;
mod draft;
pub mod error;
mod files;
#[cfg(test)]
pub(crate) mod fixture;
mod incoming;
mod leaving;
mod local_chunks;
pub mod manifest;
pub mod mismatch;
mod packed;
pub mod peer;
mod registry;
mod removal;
mod room;
mod scan;
mod stored;
#[cfg(test)]
mod tests;
mod verified;

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

pub(crate) use arriving::Interrupted;
pub use base::BaseImage;
pub use draft::Draft;
pub use error::Error;
pub use manifest::{Description, Manifest, Part};
pub use mismatch::{Host, Mismatch};
use peer::Peer;
pub(crate) use removal::{listed, put_away, sweep, take};

use crate::blob::digest::Digest;
use crate::image::reference::{Archive, Reference};
use crate::progress::Progress;
use crate::store::layout::Layout;
use crate::store::lock::{Lease, StoreLock};
use crate::store::{BaseDisk, PullPolicy, Store};

/// How long a snapshot is meant to last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// Until it is removed. Its digest is that of its content.
    Durable,
    /// Until this machine restarts, and only here. Nothing is read, hashed or synced; its digest is unlike any other.
    UntilRestart,
}

/// A snapshot in the store; while this value lives, neither it nor its base disk is removed.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub digest: Digest,
    pub manifest: Manifest,
    directory: PathBuf,
    #[expect(dead_code, reason = "keeps the snapshot while this value lives")]
    lease: Arc<Lease>,
}

impl Snapshot {
    fn new(layout: &Layout, digest: Digest, manifest: Manifest, lease: Arc<Lease>) -> Self {
        Self { digest, manifest, directory: layout.snapshot(&digest), lease }
    }

    /// The file of a part, which must not be written to.
    pub fn part(&self, part: Part) -> PathBuf {
        files::part(&self.directory, part)
    }
}

/// A snapshot that came from elsewhere, and how.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub snapshot: Snapshot,
    /// Bytes of chunks that were fetched, before compression. All numbers are 0 if the snapshot was in the store.
    pub fetched: u64,
    /// Bytes of chunks that other snapshots of the store had.
    pub shared: u64,
    /// Bytes of chunks that an interrupted arrival had left.
    pub resumed: u64,
}

/// A line of a list of snapshots.
#[derive(Debug, Clone)]
pub struct Summary {
    pub digest: Digest,
    pub manifest: Manifest,
    /// Digests of templates that lead to it.
    pub templates: Vec<Digest>,
    /// Bytes on disk.
    pub bytes: u64,
    pub made: SystemTime,
    pub last_used: SystemTime,
    pub pinned_by: Vec<String>,
    /// Whether the kernel keeps its files from changing (fs-verity).
    pub is_sealed: bool,
}

/// Whether a snapshot that comes from elsewhere is taken, decided before any of its chunks comes. An error says why not.
pub type Judge<'a> = dyn Fn(&Digest, &Manifest) -> Result<(), Unwanted> + Sync + 'a;
/// Why a snapshot is not taken, in the words of whoever does not want it.
pub type Unwanted = Box<dyn std::error::Error + Send + Sync>;

/// The snapshots of a store.
#[derive(Clone, Copy)]
pub struct Snapshots<'a> {
    store: &'a Store,
    judge: Option<&'a Judge<'a>>,
}

impl<'a> Snapshots<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self { store, judge: None }
    }

    /// These, but of those that come from elsewhere only what this judge wants.
    #[must_use]
    pub fn judged_by<'b>(&self, judge: &'b Judge<'b>) -> Snapshots<'b>
    where
        'a: 'b,
    {
        Snapshots { store: self.store, judge: Some(judge) }
    }

    /// Begins a snapshot of which so many bytes will be written; refuses at once what does not fit on the disk.
    pub fn draft(&self, bytes: u64) -> Result<Draft, Error> {
        Draft::new(&self.store.layout, bytes)
    }

    /// Makes a snapshot of a draft in which all parts are written. The same content twice is one snapshot.
    pub fn commit(
        &self,
        draft: Draft,
        description: Description,
        keeping: Keeping,
    ) -> Result<Snapshot, Error> {
        draft::commit(self.store, draft, description, keeping)
    }

    /// Makes the digest of all that a template was made of lead to this snapshot, and to none before.
    pub fn name(&self, template: &Digest, snapshot: &Digest) -> Result<(), Error> {
        stored::name(&self.store.layout, template, snapshot)
    }

    /// Makes a template's digest lead nowhere; it is no error if it does not lead anywhere. The snapshot stays as long as it is
    /// used, and then goes by `prune`, or when the store is above its size limit.
    pub fn forget(&self, template: &Digest) -> Result<(), Error> {
        stored::forget(&self.store.layout, template)
    }

    /// Has a snapshot stay that no template's digest leads to, such as one that was brought here: it goes when it is asked
    /// to, or when the store is above its size limit.
    pub fn keep(&self, snapshot: &Digest) -> Result<(), Error> {
        stored::name(&self.store.layout, snapshot, snapshot)
    }

    /// The base disk below a snapshot: found here, or made of its image, which may be pulled for that. The snapshot itself need
    /// not be there yet.
    pub fn base_disk(
        &self,
        manifest: &Manifest,
        policy: PullPolicy,
        progress: &dyn Progress,
    ) -> Result<BaseDisk, base::Error> {
        base::disk(self.store, manifest, policy, progress)
    }

    /// The snapshot that was made of what this digest stands for.
    pub fn find(&self, template: &Digest) -> Result<Option<Digest>, Error> {
        stored::find(&self.store.layout, template)
    }

    /// The digest of a snapshot by its start, at least four hex digits.
    pub fn resolve(&self, text: &str) -> Result<Digest, Error> {
        stored::resolve(&self.store.layout, text)
    }

    /// A snapshot that may be restored on this host: it fits, and its files hold what the manifest says.
    pub fn open(&self, digest: &Digest, host: &Host) -> Result<Snapshot, Error> {
        stored::open(self.store, digest, host)
    }

    /// A snapshot as it is, whether or not it fits this host: for those who carry it elsewhere.
    pub fn hold(&self, digest: &Digest) -> Result<Snapshot, Error> {
        stored::held(&self.store.layout, digest)
    }

    /// Where the file of a part is, whether or not the snapshot is there. Who uses the file opens the snapshot.
    pub fn place(&self, digest: &Digest, part: Part) -> PathBuf {
        files::part(&self.store.layout.snapshot(digest), part)
    }

    /// What a snapshot says of itself, whether or not it fits this host.
    pub fn manifest(&self, digest: &Digest) -> Result<Manifest, Error> {
        stored::manifest(&self.store.layout, digest)
    }

    /// Hashes all files of a snapshot, whatever is known of them. One that nobody hashed before has nothing to compare with.
    pub fn verify(&self, digest: &Digest) -> Result<(), Error> {
        let snapshot = stored::held(&self.store.layout, digest)?;
        verified::rehash(&self.store.layout, digest, &snapshot.manifest)
    }

    /// All snapshots, those used last first.
    pub fn list(&self) -> Result<Vec<Summary>, Error> {
        stored::list(&self.store.layout)
    }

    /// Writes a snapshot into an OCI image layout, or a new tar of one. Its base disk is not part of it. Returns the digest of
    /// the OCI manifest.
    pub fn export(&self, digest: &Digest, to: &Archive, progress: &dyn Progress) -> Result<Digest, Error> {
        archive::export(self.store, digest, to, progress)
    }

    /// Takes a snapshot from an OCI image layout or a tar of one. Which templates lead to it is for the caller to say: the
    /// snapshot's own word for it is no proof.
    pub fn import(&self, from: &Archive, progress: &dyn Progress) -> Result<Arrival, Error> {
        archive::import(self, from, progress)
    }

    /// Sends a snapshot to a registry; what is there already is not sent again. Returns the digest of the OCI manifest.
    pub fn push(&self, digest: &Digest, to: &Reference, progress: &dyn Progress) -> Result<Digest, Error> {
        registry::push(self.store, digest, to, progress)
    }

    /// Brings a snapshot from a registry, without what other snapshots of this store have of it.
    pub fn pull(&self, from: &Reference, progress: &dyn Progress) -> Result<Arrival, Error> {
        registry::pull(self, from, progress)
    }

    /// Asks another machine for the snapshot that was made of what this digest stands for. What it says is worth as much as
    /// its certificate: nothing in a snapshot proves of what it was made.
    pub fn find_at(
        &self,
        template: &Digest,
        peer: &Peer,
        progress: &dyn Progress,
    ) -> Result<Option<Digest>, Error> {
        peer::client::find(self.store, template, peer, progress)
    }

    /// Brings a snapshot from another machine, without what other snapshots of this store have of it.
    pub fn fetch(&self, digest: &Digest, from: &Peer, progress: &dyn Progress) -> Result<Arrival, Error> {
        peer::client::fetch(self, digest, from, progress)
    }

    /// Removes what interrupted arrivals have left, which otherwise waits a week for the next attempt.
    pub fn give_up_arrivals(&self) -> Result<(), Error> {
        let removing = StoreLock::exclusive(&self.store.layout)?;
        arriving::sweep(&self.store.layout, Interrupted::Removed, &removing)
    }

    /// Removes a snapshot that nothing uses, with the names that lead to it; returns the bytes that became free.
    pub fn remove(&self, digest: &Digest) -> Result<u64, Error> {
        removal::remove(self.store, digest)
    }
}

/// On a thread of its own, because the caller's may be one that runs async code.
fn apart<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let done = std::thread::scope(|scope| scope.spawn(work).join());
    done.unwrap_or_else(|panic| resume_unwind(panic))
}
