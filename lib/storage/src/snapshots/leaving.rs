//! A snapshot on its way out: its chunks read, verified, compressed, and given to whoever carries them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};

use super::artifact::{self, Artifact, Blob, Indexes, Wanted, distinct};
use super::error::Error;
use super::manifest::Part;
use super::mismatch::Mismatch;
use super::packed::pack;
use super::{Snapshot, files, stored, verified};
use crate::blob::digest::Digest;
use crate::progress::{Event, Progress};
use crate::store::Store;

/// A snapshot that may leave this machine, with the files that it is read from.
pub(super) struct Leaving {
    pub(super) snapshot: Snapshot,
    pub(super) manifest: Vec<u8>,
    pub(super) indexes: Indexes,
    parts: [(Part, File); 3],
}

/// Takes the blobs of an artifact, from several threads at once.
pub(super) type Carry<'a> = dyn Fn(&Digest, Vec<u8>) -> Result<(), Error> + Sync + 'a;

impl Leaving {
    pub(super) fn open(store: &Store, digest: &Digest) -> Result<Self, Error> {
        let layout = &store.layout;
        let snapshot = stored::held(layout, digest)?;
        let (_, manifest) = stored::manifest_with_bytes(layout, digest)?;
        if snapshot.manifest.local.is_some() {
            return Err(Error::Local { snapshot: *digest });
        }
        let refused = |reason| Error::Refused { snapshot: *digest, reason };
        let find = |part| verified::index(&snapshot.directory, &snapshot.manifest, part);
        let index = |part| {
            if let Some(index) = find(part)? {
                return Ok((part, index));
            }
            // Made again from the parts, if they are good.
            verified::rehash(layout, digest, &snapshot.manifest)?;
            find(part)?.map(|index| (part, index)).ok_or_else(|| refused(Mismatch::Missing { part }))
        };
        let indexes = [index(Part::Memory)?, index(Part::State)?, index(Part::Scratch)?];
        let open = |part| match File::open(files::part(&snapshot.directory, part)) {
            Ok(file) => Ok((part, file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(refused(Mismatch::Missing { part })),
            Err(source) => Err(Error::Read { path: files::part(&snapshot.directory, part), source }),
        };
        let parts = [open(Part::Memory)?, open(Part::State)?, open(Part::Scratch)?];
        Ok(Self { snapshot, manifest, indexes, parts })
    }

    /// The content of a chunk. Damage does not travel.
    pub(super) fn read(&self, wanted: &Wanted) -> Result<Vec<u8>, Error> {
        let damaged = Mismatch::Damaged { part: wanted.part, at: wanted.offset };
        let damaged = || Error::Refused { snapshot: self.snapshot.digest, reason: damaged.clone() };
        let file = self.parts.iter().find(|(part, _)| *part == wanted.part).map(|(_, file)| file);
        let mut content = vec![0; usize::try_from(wanted.length).map_err(|_| damaged())?];
        file.ok_or_else(damaged)?.read_exact_at(&mut content, wanted.offset).map_err(|source| {
            let path = self.snapshot.part(wanted.part);
            Error::Read { path, source }
        })?;
        if Digest::of(&content) == wanted.digest { Ok(content) } else { Err(damaged()) }
    }

    /// Gives all blobs of the artifact away and returns what names them: it is to be carried last.
    pub(super) fn carry(
        &self,
        threads: usize,
        carry: &Carry<'_>,
        progress: &dyn Progress,
    ) -> Result<Artifact, Error> {
        let small = |bytes: Vec<u8>, media_type: &str| {
            let digest = Digest::of(&bytes);
            let blob = Blob { media_type: media_type.to_owned(), digest, size: bytes.len() as u64 };
            carry(&digest, bytes).map(|()| blob)
        };
        let snapshot = small(self.manifest.clone(), artifact::MANIFEST)?;
        let [memory, state, scratch] = &self.indexes;
        let index = |(_, index): &(Part, super::chunks::Index)| small(index.bytes(), artifact::INDEX);
        let indexes = [index(memory)?, index(state)?, index(scratch)?];
        let wanted = distinct(&self.indexes);
        let total: u64 = wanted.iter().map(|chunk| chunk.length).sum();
        let queue = Mutex::new((0, wanted.iter().enumerate()));
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).1.next();
        let (chunks, failure) = (Mutex::new(vec![None; wanted.len()]), Mutex::new(None));
        let one = |wanted: &Wanted| {
            let packed = pack(&self.read(wanted)?);
            let packed =
                packed.map_err(|source| Error::Read { path: self.snapshot.part(wanted.part), source })?;
            small(packed, artifact::CHUNK)
        };
        let work = || {
            while let Some((number, wanted)) = next() {
                match one(wanted) {
                    Ok(blob) => {
                        let mut chunks = chunks.lock().unwrap_or_else(PoisonError::into_inner);
                        chunks.get_mut(number).map(|chunk| chunk.replace(blob));
                        drop(chunks);
                        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                        queue.0 += wanted.length;
                        let bytes = queue.0;
                        drop(queue);
                        progress.report(Event::Transferred { blob: self.snapshot.digest, bytes, total });
                    }
                    Err(error) => {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        return;
                    }
                }
                if failure.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, wanted.len().max(1)) {
                scope.spawn(work);
            }
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let chunks = chunks.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Artifact { snapshot, indexes, chunks: chunks.into_iter().flatten().collect() })
    }
}
