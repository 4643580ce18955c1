//! The documents of a snapshot that comes as an artifact: nothing of them is believed before it was verified.

use std::collections::HashMap;

use super::artifact::{self, Artifact, Blob, Indexes};
use super::chunks::Index;
use super::error::Error;
use super::manifest::{self, Manifest, Part};
use super::mismatch::Mismatch;
use super::packed::largest_packed;
use crate::blob::digest::Digest;

/// What says which chunks there are.
pub(super) struct Documents {
    pub(super) manifest: Manifest,
    /// Of the manifest, as they came.
    pub(super) bytes: Vec<u8>,
    pub(super) indexes: Indexes,
}

/// Reads manifest and indexes. What `read` returns has the digest that was asked for.
pub(super) fn documents(
    from: &str,
    artifact: &Artifact,
    read: &dyn Fn(&Blob) -> Result<Vec<u8>, Error>,
) -> Result<Documents, Error> {
    let bytes = read(&artifact.snapshot)?;
    let manifest = manifest(from, &artifact.snapshot.digest, &bytes)?;
    let [memory, state, scratch] = &artifact.indexes;
    let index = |part, blob: &Blob| {
        let content = manifest.parts.get(part);
        let expected = content.size.div_ceil(content.chunks.as_ref().map_or(1, |it| it.size.max(1))) * 32;
        if blob.size != expected {
            let source = artifact::Error::Index { part, expected, found: blob.size };
            return Err(Error::Artifact { from: from.to_owned(), source });
        }
        self::index(from, &manifest, part, &read(blob)?)
    };
    let indexes = [index(Part::Memory, memory)?, index(Part::State, state)?, index(Part::Scratch, scratch)?];
    Ok(Documents { manifest, bytes, indexes })
}

/// The manifest of a snapshot that comes from elsewhere. It has the digest that was asked for, or is refused.
pub(super) fn manifest(from: &str, digest: &Digest, bytes: &[u8]) -> Result<Manifest, Error> {
    let found = Digest::of(bytes);
    if found != *digest {
        return Err(Error::WrongBlob { from: from.to_owned(), expected: *digest, found });
    }
    let manifest = Manifest::parse(bytes).map_err(|source| match source {
        manifest::Error::Format { found } => {
            Error::Refused { snapshot: *digest, reason: Mismatch::Format { found } }
        }
        source => Error::Manifest { from: from.to_owned(), source },
    })?;
    if manifest.local.is_some() {
        return Err(Error::Local { snapshot: *digest });
    }
    Ok(manifest)
}

/// The index of a part, which has the digest that the manifest says, or is refused.
pub(super) fn index(
    from: &str,
    manifest: &Manifest,
    part: Part,
    bytes: &[u8],
) -> Result<(Part, Index), Error> {
    let content = manifest.parts.get(part);
    let found = Digest::of(bytes);
    match &content.chunks {
        Some(chunks) if chunks.digest == found => {}
        Some(chunks) => {
            return Err(Error::WrongBlob { from: from.to_owned(), expected: chunks.digest, found });
        }
        None => return Err(Error::Manifest { from: from.to_owned(), source: manifest::Error::Mixed }),
    }
    let index = Index::parse(content.size, bytes).map_err(|source| Error::Manifest {
        from: from.to_owned(),
        source: manifest::Error::Part { part, source },
    })?;
    Ok((part, index))
}

/// The blob of each chunk, by the digest and the length of its content.
pub(super) type Places = HashMap<(Digest, u64), Blob>;

pub(super) fn places(from: &str, artifact: &Artifact, indexes: &Indexes) -> Result<Places, Error> {
    let failed = |source| Error::Artifact { from: from.to_owned(), source };
    let mut places = HashMap::new();
    for (wanted, blob) in artifact.chunks_of(indexes).map_err(failed)? {
        let limit = largest_packed(wanted.length);
        if blob.size > limit {
            let source = artifact::Error::Size { blob: blob.digest, size: blob.size, limit };
            return Err(failed(source));
        }
        places.insert((wanted.digest, wanted.length), blob.clone());
    }
    Ok(places)
}
