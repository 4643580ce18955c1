//! A snapshot as an OCI artifact: what its OCI manifest looks like, and what of one that came is believed. Pure.
//!
//! The configuration blob is the snapshot's manifest, so its digest is the snapshot's. The layers are the indexes of memory,
//! state and scratch, as they are, and then each chunk that is not all zeros once, compressed, in the order in which the
//! indexes first name it: so no further list says which blob holds which chunk.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::chunks::{self, Index};
use super::manifest::{self, Part};
use super::packed::largest_packed;
use crate::blob::digest::Digest;
use crate::image::manifest::LARGEST;

pub const ARTIFACT: &str = "application/vnd.imp.snapshot.v1";
pub const MANIFEST: &str = "application/vnd.imp.snapshot.manifest.v1+json";
pub const INDEX: &str = "application/vnd.imp.snapshot.index.v1";
pub const CHUNK: &str = "application/vnd.imp.snapshot.chunk.v1+zstd";
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Bytes of the longest index.
const LARGEST_INDEX: u64 = chunks::MOST * 32;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("it is not an OCI manifest")]
    Json(#[source] serde_json::Error),
    #[error("it is no snapshot of a VM but {found:?}; images are pulled by: imp image pull")]
    NotASnapshot { found: String },
    #[error("blob {blob} of it is {found:?}, where {expected} belongs")]
    MediaType { blob: Digest, found: String, expected: &'static str },
    #[error("blob {blob} of it would have {size} bytes, at most {limit} are allowed")]
    Size { blob: Digest, size: u64, limit: u64 },
    #[error("it has {0} layers; a snapshot has 3 and its chunks")]
    Layers(usize),
    #[error("it has {found} chunks, its indexes name {expected}")]
    Chunks { expected: usize, found: usize },
    #[error("its index of {part} has {found} bytes instead of {expected}")]
    Index { part: Part, expected: u64, found: u64 },
    #[error("its OCI manifest would have {0} bytes, more than registries take")]
    TooLarge(u64),
}

/// A blob of the artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    #[serde(rename = "mediaType")]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
}

/// What the OCI manifest of a snapshot names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    /// The snapshot's manifest.
    pub snapshot: Blob,
    /// In the order of [`Part::ALL`].
    pub indexes: [Blob; 3],
    /// In the order of [`distinct`].
    pub chunks: Vec<Blob>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: u32,
    media_type: String,
    #[serde(default)]
    artifact_type: String,
    config: Blob,
    layers: Vec<Blob>,
}

impl Artifact {
    /// The OCI manifest.
    pub fn bytes(&self) -> Result<Vec<u8>, Error> {
        let document = Document {
            schema_version: 2,
            media_type: OCI_MANIFEST.to_owned(),
            artifact_type: ARTIFACT.to_owned(),
            config: self.snapshot.clone(),
            layers: self.indexes.iter().chain(&self.chunks).cloned().collect(),
        };
        let bytes = serde_json::to_vec(&document).map_err(Error::Json)?;
        let size = bytes.len() as u64;
        if size > LARGEST { Err(Error::TooLarge(size)) } else { Ok(bytes) }
    }

    /// Reads an OCI manifest of at most [`LARGEST`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let document: Document = serde_json::from_slice(bytes).map_err(Error::Json)?;
        let shown = |text: &str| text.chars().filter(|letter| !letter.is_control()).take(100).collect();
        if document.config.media_type != MANIFEST || document.media_type != OCI_MANIFEST {
            let found = [&document.artifact_type, &document.config.media_type, &document.media_type];
            let found = found.into_iter().find(|text| !text.is_empty()).map_or("", String::as_str);
            return Err(Error::NotASnapshot { found: shown(found) });
        }
        let check = |blob: Blob, expected: &'static str, limit: u64| {
            if blob.media_type != expected {
                let found = shown(&blob.media_type);
                return Err(Error::MediaType { blob: blob.digest, found, expected });
            }
            if blob.size > limit {
                return Err(Error::Size { blob: blob.digest, size: blob.size, limit });
            }
            Ok(blob)
        };
        let count = document.layers.len();
        let mut layers = document.layers.into_iter();
        let mut next = || layers.next().ok_or(Error::Layers(count));
        let mut index = || check(next()?, INDEX, LARGEST_INDEX);
        let indexes = [index()?, index()?, index()?];
        let chunks = layers.map(|blob| check(blob, CHUNK, largest_packed(chunks::LARGEST)));
        Ok(Self {
            snapshot: check(document.config, MANIFEST, manifest::LARGEST)?,
            indexes,
            chunks: chunks.collect::<Result<_, _>>()?,
        })
    }

    /// The blobs of all distinct chunks, in their order.
    pub fn chunks_of(&self, indexes: &Indexes) -> Result<Vec<(Wanted, &Blob)>, Error> {
        let wanted = distinct(indexes);
        let (expected, found) = (wanted.len(), self.chunks.len());
        if expected != found {
            return Err(Error::Chunks { expected, found });
        }
        Ok(wanted.into_iter().zip(&self.chunks).collect())
    }
}

/// The indexes of memory, state and scratch.
pub type Indexes = [(Part, Index); 3];

/// A chunk by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub digest: Digest,
    pub length: u64,
    /// The first place that has it.
    pub part: Part,
    pub offset: u64,
}

/// Each chunk that is not all zeros once, where it is first named.
pub fn distinct(indexes: &Indexes) -> Vec<Wanted> {
    let mut known = HashSet::new();
    let all = indexes.iter().flat_map(|(part, index)| index.full().map(|chunk| (*part, chunk)));
    let all = all.filter(|(_, chunk)| known.insert((chunk.digest, chunk.length)));
    all.map(|(part, chunk)| Wanted { digest: chunk.digest, length: chunk.length, part, offset: chunk.offset })
        .collect()
}

#[cfg(test)]
#[path = "artifact_tests.rs"]
mod tests;
