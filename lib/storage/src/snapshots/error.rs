//! Why the store could not do with a snapshot what it was asked for.

use std::io;
use std::path::{Path, PathBuf};

use super::artifact;
use super::manifest::{self, Part};
use super::mismatch::Mismatch;
use super::peer::tls;
use crate::blob::digest::Digest;
use crate::disk::is_full;
use crate::image::reference::Reference;
use crate::image::{archive, registry};
use crate::{blob, store};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(
        "not enough disk space below {path}: the snapshot needs {} MiB, {} MiB are free; free some with: imp prune",
        mebibytes(*.needed), .available >> 20
    )]
    NoRoom { path: PathBuf, needed: u64, available: u64 },
    #[error("the disk that holds {path} is full; free space there (imp prune) and try again")]
    DiskFull {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("there is no snapshot {0:?} in the store")]
    NoSnapshot(String),
    #[error("{text:?} means {} snapshots; type more of the digest", .candidates.len())]
    Ambiguous { text: String, candidates: Vec<Digest> },
    #[error("snapshot {snapshot} is used by {}; end that first", .owners.join(", "))]
    InUse { snapshot: Digest, owners: Vec<String> },
    #[error("snapshot {} cannot be used here", .snapshot.short())]
    Refused {
        snapshot: Digest,
        #[source]
        reason: Mismatch,
    },
    #[error("snapshot {} is not taken", .snapshot.short())]
    Unwanted {
        snapshot: Digest,
        #[source]
        source: super::Unwanted,
    },
    #[error("the snapshot has no {part}: {path} is missing")]
    PartMissing { part: Part, path: PathBuf },
    #[error("the snapshot's {part} is still open for writing; whoever writes {path} must end first")]
    StillWritten { part: Part, path: PathBuf },
    #[error("the snapshot cannot be described")]
    Description(#[source] manifest::Error),
    #[error("snapshot {} is good on this machine only: nobody hashed it", .snapshot.short())]
    Local { snapshot: Digest },
    #[error("{archive} cannot hold snapshots; use oci:DIRECTORY or oci-archive:FILE")]
    ArchiveFormat { archive: String },
    #[error("{archive} has no snapshot of that name")]
    NoSnapshotIn { archive: String },
    #[error("{archive} has {count} snapshots; say which, by its name behind a colon")]
    SeveralIn { archive: String, count: usize },
    #[error("cannot read {archive}")]
    Archive {
        archive: String,
        #[source]
        source: Box<archive::Error>,
    },
    #[error("cannot reach the snapshot {reference}")]
    Registry {
        reference: Box<Reference>,
        #[source]
        source: Box<registry::Error>,
    },
    #[error("cannot get a snapshot from the peer {peer}")]
    Peer {
        peer: String,
        #[source]
        source: Box<registry::Error>,
    },
    #[error(
        "the peer {peer} does not serve this machine: its certificate has none of the names that may ask"
    )]
    NotAuthorised { peer: String },
    #[error("the peer {peer} has no such snapshot, or does not give it away")]
    NotThere { peer: String },
    #[error("the peer {peer} answered with something else than a digest")]
    NoDigest { peer: String },
    #[error(transparent)]
    Tls(#[from] tls::Error),
    #[error("what came from {from} cannot be used as a snapshot")]
    Artifact {
        from: String,
        #[source]
        source: artifact::Error,
    },
    #[error("the snapshot that came from {from} cannot be used")]
    Manifest {
        from: String,
        #[source]
        source: manifest::Error,
    },
    #[error("{from} gave content with digest {found} for {expected}; it was thrown away")]
    WrongBlob { from: String, expected: Digest, found: Digest },
    #[error("{from} gave other content than promised for the {part} at byte {at}; it was thrown away")]
    WrongChunk { from: String, part: Part, at: u64 },
}

/// Rounded up, so that what is missing is never called nothing.
fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Sorts a failed write by what the user can do about it.
pub(super) fn write_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    if is_full(&source) { Error::DiskFull { path, source } } else { Error::Write { path, source } }
}

impl From<blob::Error> for Error {
    fn from(error: blob::Error) -> Self {
        Self::Store(error.into())
    }
}
