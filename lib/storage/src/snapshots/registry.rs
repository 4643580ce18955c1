//! Snapshots in registries.

use super::arriving::{Incoming, receive};
use super::artifact::{Artifact, Wanted};
use super::error::Error;
use super::leaving::Leaving;
use super::packed::unpack;
use super::{Arrival, Snapshots, apart, incoming};
use crate::blob::digest::Digest;
use crate::image::reference::Reference;
use crate::image::registry::artifacts::Repository;
use crate::progress::Progress;
use crate::store::Store;

/// Most transfers at once that settings may ask for.
const MOST_PARALLEL: usize = 16;

pub(super) fn push(
    store: &Store,
    digest: &Digest,
    to: &Reference,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    let failed = |source| Error::Registry { reference: Box::new(to.clone()), source: Box::new(source) };
    apart(|| {
        let leaving = Leaving::open(store, digest)?;
        let settings = &store.options.registries;
        let repository = Repository::to_push(to, settings, progress).map_err(failed)?;
        let carry = |digest: &Digest, bytes: Vec<u8>| {
            repository.push_blob(digest, bytes.into()).map(drop).map_err(failed)
        };
        let artifact = leaving.carry(parallel(store), &carry, progress)?;
        let bytes = artifact.bytes().map_err(|source| Error::Artifact { from: to.to_string(), source })?;
        let digest = Digest::of(&bytes);
        repository.push_manifest(bytes).map_err(failed)?;
        Ok(digest)
    })
}

pub(super) fn pull(
    snapshots: &Snapshots<'_>,
    from: &Reference,
    progress: &dyn Progress,
) -> Result<Arrival, Error> {
    let store = snapshots.store;
    let failed = |source| Error::Registry { reference: Box::new(from.clone()), source: Box::new(source) };
    let name = from.familiar();
    apart(|| {
        let settings = &store.options.registries;
        let repository = Repository::to_pull(from, settings, progress).map_err(failed)?;
        let bytes = repository.manifest().map_err(failed)?;
        let artifact =
            Artifact::parse(&bytes).map_err(|source| Error::Artifact { from: name.clone(), source })?;
        let documents = incoming::documents(&name, &artifact, &|blob| {
            repository.blob(&blob.digest, blob.size).map_err(failed)
        })?;
        let places = incoming::places(&name, &artifact, &documents.indexes)?;
        let fetch = |wanted: &Wanted| {
            let wrong = || Error::WrongChunk { from: name.clone(), part: wanted.part, at: wanted.offset };
            let blob = places.get(&(wanted.digest, wanted.length)).ok_or_else(wrong)?;
            let packed = repository.blob(&blob.digest, blob.size).map_err(failed)?;
            unpack(&packed, wanted.length).ok_or_else(wrong)
        };
        let incoming = Incoming {
            digest: artifact.snapshot.digest,
            manifest: documents.manifest,
            bytes: documents.bytes,
            indexes: documents.indexes,
            from: name.clone(),
            fetch: &fetch,
            parallel: parallel(store),
        };
        receive(snapshots, &incoming, progress)
    })
}

fn parallel(store: &Store) -> usize {
    store.options.registries.parallel_downloads.clamp(1, MOST_PARALLEL)
}
