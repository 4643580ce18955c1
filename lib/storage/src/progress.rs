//! What a long operation reports while it runs; how that looks is the caller's business.

use std::time::Duration;

use crate::blob::digest::Digest;

/// Receives events, from several threads at once. Closures are receivers; `&()` ignores everything.
pub trait Progress: Sync {
    fn report(&self, event: Event);
}

/// One step of a pull, an import or a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A registry or an archive is asked what a name means.
    Resolving { name: String },
    /// The image is known; these layers make it, lowest first, with their sizes in bytes.
    Resolved { image: Digest, layers: Vec<(Digest, u64)> },
    /// This blob is already in the store.
    Present { blob: Digest },
    /// So many bytes of a blob have arrived.
    Transferred { blob: Digest, bytes: u64, total: u64 },
    /// The same blob or disk is being made by someone else; this operation takes the result.
    Waiting { digest: Digest },
    /// A request failed in a way that may pass; it is tried again after the pause.
    Retrying { what: String, attempt: u32, pause: Duration, reason: String },
    /// All bytes of this blob are in the store and have its digest.
    Verified { blob: Digest },
    /// So many bytes of an image's layers have gone into its disk.
    Building { disk: Digest, bytes: u64, total: u64 },
    /// The disk is complete, with its size in bytes.
    Built { disk: Digest, bytes: u64 },
    /// The image is in the store.
    Stored { image: Digest },
}

impl<F: Fn(Event) + Sync> Progress for F {
    fn report(&self, event: Event) {
        self(event);
    }
}

impl Progress for () {
    fn report(&self, _event: Event) {}
}
