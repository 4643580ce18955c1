//! Why the store could not do what it was asked for.

use std::io;
use std::path::PathBuf;

use crate::blob;
use crate::blob::digest::Digest;
use crate::image::platform::Platform;
use crate::image::reference::Reference;
use crate::image::{archive, base, config, registry};
use crate::snapshots;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the store {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the store {path} has format {found:?}, this version knows {known:?}; use the version of imp that made it, or another data directory"
    )]
    Format { path: PathBuf, found: String, known: &'static str },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot lock {path}")]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Blob(#[from] blob::Error),
    #[error(transparent)]
    Snapshot(Box<snapshots::Error>),
    #[error("cannot pull {reference}")]
    Pull {
        reference: Reference,
        #[source]
        source: Box<registry::Error>,
    },
    #[error("cannot import {archive}")]
    Import {
        archive: String,
        #[source]
        source: Box<archive::Error>,
    },
    #[error("image {reference} is not in the store; get it with: imp image pull {}", .reference.familiar())]
    NotPresent { reference: Reference },
    #[error("there is no image {0:?} in the store; see: imp image ls")]
    NoImage(String),
    #[error("{text:?} means {} images; type more of the digest: {}", .candidates.len(), list(.candidates))]
    Ambiguous { text: String, candidates: Vec<Digest> },
    #[error("neither an image nor a disk nor a snapshot {0} is in the store")]
    NothingToPin(Digest),
    #[error("{0:?} cannot own a pin: 1 to 128 letters, digits, dots, dashes or underscores")]
    Owner(String),
    #[error("image {image} is used by {}; stop that first", .owners.join(", "))]
    InUse { image: Digest, owners: Vec<String> },
    #[error("image {image}: its configuration cannot be used")]
    Config {
        image: Digest,
        #[source]
        source: config::Error,
    },
    #[error("image {image}: its manifest has {layers} layers, its configuration {diff_ids}")]
    LayerCount { image: Digest, layers: usize, diff_ids: usize },
    #[error("image {image} is for {found}, this store wants {wanted}")]
    Platform { image: Digest, found: Box<Platform>, wanted: Box<Platform> },
    #[error("cannot make the disk of image {image}")]
    Build {
        image: Digest,
        #[source]
        source: Box<base::Error>,
    },
}

impl From<snapshots::Error> for Error {
    fn from(error: snapshots::Error) -> Self {
        match error {
            snapshots::Error::Store(error) => error,
            error => Self::Snapshot(Box::new(error)),
        }
    }
}

fn list(digests: &[Digest]) -> String {
    digests.iter().take(5).map(Digest::short).collect::<Vec<_>>().join(", ")
}
