//! A snapshot on its way into the store: from a registry, an archive or a peer, chunk by chunk, each verified before it is
//! written.
//!
//! ```text
//! manifest and indexes, verified ─► arriving/<hex>/ ─► what is there already is hashed and kept
//!   ─► missing chunks: copied from another snapshot, or fetched ─► synced ─► manifest.json ─► renamed to snapshots/<hex>
//! ```
//!
//! An arrival that is interrupted leaves its directory, and the next one goes on with what it finds there to be good.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use imp_sys::sparse::{full, zeros};

use super::artifact::{Indexes, Wanted};
use super::chunks::Index;
use super::error::{Error, write_error};
use super::local_chunks::LocalChunks;
use super::manifest::{Manifest, Part};
use super::scan::{self, Zeros};
use super::{Arrival, Snapshot, Snapshots, draft, files, room, stored};
use crate::blob::digest::Digest;
use crate::blob::partial::is_still_named;
use crate::progress::{Event, Progress};
use crate::store::Store;
use crate::store::layout::Layout;
use crate::store::lock::{StoreLock, entries};

/// What file systems allocate; smaller runs of zeros are written.
const BLOCK: usize = 4 << 10;
/// An arrival that nobody has continued for so long is given up.
const GIVEN_UP: Duration = Duration::from_secs(7 * 24 * 3600);

/// Brings the content of a chunk from elsewhere, from several threads at once. What comes is verified by who asks.
pub(super) type Fetch<'a> = dyn Fn(&Wanted) -> Result<Vec<u8>, Error> + Sync + 'a;

/// What comes, and from where.
pub(super) struct Incoming<'a> {
    pub(super) digest: Digest,
    pub(super) manifest: Manifest,
    /// Of the manifest, as they came.
    pub(super) bytes: Vec<u8>,
    pub(super) indexes: Indexes,
    /// For messages.
    pub(super) from: String,
    pub(super) fetch: &'a Fetch<'a>,
    /// Chunks that are fetched at once.
    pub(super) parallel: usize,
}

/// The content that belongs to one or more places, and is at none of them.
struct Missing {
    wanted: Wanted,
    /// Part, offset, and what is there.
    places: Vec<(Part, u64, There)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum There {
    Zeros,
    /// What an interrupted arrival left half.
    Rubbish,
}

#[derive(Default)]
struct Counts {
    fetched: u64,
    shared: u64,
}

/// Brings a snapshot into the store, unless it is there.
pub(super) fn receive(
    snapshots: &Snapshots<'_>,
    incoming: &Incoming<'_>,
    progress: &dyn Progress,
) -> Result<Arrival, Error> {
    let Snapshots { store, judge } = *snapshots;
    let layout = &store.layout;
    if let Some(judge) = judge {
        let snapshot = incoming.digest;
        judge(&snapshot, &incoming.manifest).map_err(|source| Error::Unwanted { snapshot, source })?;
    }
    let lock = ArrivalLock::wait(layout, &incoming.digest, progress)?;
    if let Some(snapshot) = present(layout, &incoming.digest)? {
        return Ok(Arrival { snapshot, fetched: 0, shared: 0, resumed: 0 });
    }
    let directory = lock.directory();
    keep_only_parts(&directory)?;
    let (missing, resumed) = look(&directory, incoming)?;
    let total: u64 = missing.iter().map(|it| it.wanted.length * it.places.len() as u64).sum();
    if let Err(error) = room::check(&layout.arriving(), total) {
        if resumed == 0 {
            // Nothing but empty files.
            files::remove_directory(&directory)?;
        }
        return Err(error);
    }
    let counts = fill(store, &directory, incoming, missing, progress)?;
    for (part, index) in &incoming.indexes {
        let path = files::part(&directory, *part);
        let synced = File::open(&path).and_then(|file| file.sync_all());
        synced.map_err(|source| write_error(&path, source))?;
        draft::write_index(&directory, *part, index)?;
    }
    let snapshot = draft::finish(store, &directory, incoming.manifest.clone(), &incoming.bytes)?;
    // Still there if the same was made here meanwhile.
    files::remove_directory(&directory)?;
    progress.report(Event::Verified { blob: incoming.digest });
    Ok(Arrival { snapshot, fetched: counts.fetched, shared: counts.shared, resumed })
}

/// The snapshot, if it is in the store and looks whole.
pub(super) fn present(layout: &Layout, digest: &Digest) -> Result<Option<Snapshot>, Error> {
    match stored::held(layout, digest) {
        Ok(snapshot) => Ok(Some(snapshot)),
        Err(Error::NoSnapshot(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Compares what is there with what belongs there. Files get their sizes.
fn look(directory: &Path, incoming: &Incoming<'_>) -> Result<(Vec<Missing>, u64), Error> {
    let (mut missing, mut resumed) = (Vec::<Missing>::new(), 0);
    let mut known: HashMap<(Digest, u64), usize> = HashMap::new();
    for (part, index) in &incoming.indexes {
        let found = found(directory, *part, index)?;
        let written: HashSet<u64> = found.full().map(|chunk| chunk.offset).collect();
        let there = |offset| if written.contains(&offset) { There::Rubbish } else { There::Zeros };
        let is_missing: HashMap<u64, There> =
            index.differing(&found).map(|offset| (offset, there(offset))).collect();
        for chunk in index.full() {
            let Some(there) = is_missing.get(&chunk.offset) else {
                resumed += chunk.length;
                continue;
            };
            let place = (*part, chunk.offset, *there);
            let wanted =
                Wanted { digest: chunk.digest, length: chunk.length, part: *part, offset: chunk.offset };
            let number = *known.entry((chunk.digest, chunk.length)).or_insert(missing.len());
            match missing.get_mut(number) {
                Some(known) => known.places.push(place),
                None => missing.push(Missing { wanted, places: vec![place] }),
            }
        }
    }
    Ok((missing, resumed))
}

/// The index of what an earlier arrival left of a part.
fn found(directory: &Path, part: Part, expected: &Index) -> Result<Index, Error> {
    let path = files::part(directory, part);
    let size = expected.size();
    let failed = |source| Error::Read { path: path.clone(), source };
    if let Ok(file) = File::open(&path) {
        let found = scan::index(&file, size, Zeros::Kept);
        match found {
            Ok(found) if file.metadata().map_err(failed)?.len() == size => {
                let full: HashSet<u64> = expected.full().map(|chunk| chunk.offset).collect();
                let rubbish_where_zeros_belong =
                    expected.differing(&found).any(|offset| !full.contains(&offset));
                // Sealed already, or readable only: then it is whole, or made anew.
                let is_writable = OpenOptions::new().write(true).open(&path).is_ok();
                if !rubbish_where_zeros_belong && (is_writable || found == *expected) {
                    return Ok(found);
                }
            }
            _ => {}
        }
        fs::remove_file(&path).map_err(|source| write_error(&path, source))?;
    }
    let made = File::create_new(&path).and_then(|file| file.set_len(size));
    made.map_err(|source| write_error(&path, source))?;
    Index::zero(size).map_err(|source| failed(io::Error::other(source)))
}

/// Brings all that is missing; the first failure ends the work of all threads.
fn fill(
    store: &Store,
    directory: &Path,
    incoming: &Incoming<'_>,
    missing: Vec<Missing>,
    progress: &dyn Progress,
) -> Result<Counts, Error> {
    if missing.is_empty() {
        return Ok(Counts::default());
    }
    let local = LocalChunks::of(&store.layout)?;
    let parts = open_parts(directory)?;
    let total: u64 = missing.iter().map(|it| it.wanted.length).sum();
    let threads = incoming.parallel.clamp(1, missing.len());
    let queue = Mutex::new(VecDeque::from(missing));
    let (counts, failure) = (Mutex::new(Counts::default()), Mutex::new(None));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || {
        while let Some(missing) = next() {
            match bring(&local, &parts, incoming, &missing) {
                Ok(was_shared) => {
                    let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                    let length = missing.wanted.length;
                    *(if was_shared { &mut counts.shared } else { &mut counts.fetched }) += length;
                    let bytes = counts.shared + counts.fetched;
                    drop(counts);
                    progress.report(Event::Transferred { blob: incoming.digest, bytes, total });
                }
                Err(error) => {
                    queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(counts.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// Brings one chunk to all its places; says whether another snapshot had it.
fn bring(
    local: &LocalChunks,
    parts: &[(Part, PathBuf, Option<File>); 3],
    incoming: &Incoming<'_>,
    missing: &Missing,
) -> Result<bool, Error> {
    let wanted = &missing.wanted;
    let (content, source) = match local.read(wanted) {
        Some((content, source)) => (content, Some(source)),
        None => {
            let content = (incoming.fetch)(wanted)?;
            if content.len() as u64 != wanted.length || Digest::of(&content) != wanted.digest {
                let (from, part, at) = (incoming.from.clone(), wanted.part, wanted.offset);
                return Err(Error::WrongChunk { from, part, at });
            }
            (content, None)
        }
    };
    for (part, offset, there) in &missing.places {
        let place = parts.iter().find(|(known, _, file)| known == part && file.is_some());
        let Some((_, path, Some(file))) = place else { continue };
        let shared = source.as_ref().is_some_and(|source| source.share(file, *offset, wanted.length));
        if !shared {
            let written = match there {
                There::Zeros => write_sparse(file, &content, *offset),
                There::Rubbish => file.write_all_at(&content, *offset),
            };
            written.map_err(|source| write_error(path, source))?;
        }
    }
    Ok(source.is_some())
}

/// Writes what is not zeros, where zeros are.
fn write_sparse(file: &File, content: &[u8], offset: u64) -> io::Result<()> {
    let mut at = 0;
    while let Some(rest) = content.get(at..).filter(|rest| !rest.is_empty()) {
        at += zeros(rest, BLOCK);
        let rest = content.get(at..).unwrap_or_default();
        let length = full(rest, BLOCK);
        file.write_all_at(rest.get(..length).unwrap_or_default(), offset + at as u64)?;
        at += length;
    }
    Ok(())
}

/// A part that is whole may be sealed: it is not opened for writing, and nothing of it is missing.
fn open_parts(directory: &Path) -> Result<[(Part, PathBuf, Option<File>); 3], Error> {
    let open = |part| {
        let path = files::part(directory, part);
        match OpenOptions::new().write(true).open(&path) {
            Ok(file) => Ok((part, path, Some(file))),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok((part, path, None)),
            Err(source) => Err(write_error(&path, source)),
        }
    };
    Ok([open(Part::Memory)?, open(Part::State)?, open(Part::Scratch)?])
}

/// Manifest and indexes are written again: they come last.
fn keep_only_parts(directory: &Path) -> Result<(), Error> {
    for path in entries(directory)? {
        if !Part::ALL.iter().any(|part| files::part(directory, *part) == path) {
            fs::remove_file(&path).map_err(|source| write_error(&path, source))?;
        }
    }
    Ok(())
}

/// The right to bring one snapshot, until it is dropped.
struct ArrivalLock {
    #[expect(dead_code, reason = "held for its lock")]
    file: File,
    path: PathBuf,
}

impl ArrivalLock {
    fn wait(layout: &Layout, digest: &Digest, progress: &dyn Progress) -> Result<Self, Error> {
        let path = layout.arriving().join(format!("{}.lock", digest.hex()));
        let failed = |source| write_error(&path, source);
        loop {
            let file = {
                let _using = StoreLock::shared(layout)?;
                OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(failed)?
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    progress.report(Event::Waiting { digest: *digest });
                    file.lock().map_err(failed)?;
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
            // Whoever had the lock before may have removed this file.
            if is_still_named(&file, &path)? {
                let lock = Self { file, path: path.clone() };
                let made = DirBuilder::new().recursive(true).mode(0o700).create(lock.directory());
                made.map_err(failed)?;
                return Ok(lock);
            }
        }
    }

    fn directory(&self) -> PathBuf {
        self.path.with_extension("")
    }
}

impl Drop for ArrivalLock {
    fn drop(&mut self) {
        // A directory in which nothing has arrived is worth nothing; one with something in it stays for the next one.
        let _ = fs::remove_dir(self.directory());
        let _ = fs::remove_file(&self.path);
    }
}

/// What becomes of interrupted arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupted {
    /// They may go on, unless they have waited for too long by this time.
    Kept(SystemTime),
    Removed,
}

/// Removes arrivals that nobody works on. The caller has the store for itself.
pub(super) fn sweep(layout: &Layout, interrupted: Interrupted, _removing: &StoreLock) -> Result<(), Error> {
    let all = entries(&layout.arriving())?;
    let is_lock = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "lock");
    for directory in all.iter().filter(|path| !is_lock(path)) {
        let lock = directory.with_extension("lock");
        // Held until the directory is gone: an arrival that has opened the file already waits for it.
        let held = File::open(&lock).ok().map(|file| (file.try_lock().is_ok(), file));
        let is_living = held.as_ref().is_some_and(|(free, _)| !free);
        let is_old = match interrupted {
            Interrupted::Removed => true,
            Interrupted::Kept(now) => fs::metadata(directory)
                .and_then(|data| data.modified())
                .is_ok_and(|changed| now.duration_since(changed).is_ok_and(|waited| waited > GIVEN_UP)),
        };
        if !is_living && is_old {
            files::remove_directory(directory)?;
        }
    }
    for lock in all.iter().filter(is_lock) {
        // As above: whoever gets it next sees that the file has lost its name.
        if let Ok(file) = File::open(lock)
            && file.try_lock().is_ok()
        {
            fs::remove_file(lock).map_err(|source| write_error(lock, source))?;
        }
    }
    Ok(())
}
