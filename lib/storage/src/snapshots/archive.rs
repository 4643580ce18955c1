//! Snapshots in files: OCI image layouts, and tars of them.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use super::arriving::{Incoming, receive};
use super::artifact::{ARTIFACT, Artifact, OCI_MANIFEST, Wanted};
use super::error::{Error, write_error};
use super::leaving::Leaving;
use super::packed::unpack;
use super::{Arrival, Snapshots, incoming};
use crate::blob::digest::Digest;
use crate::disk::partial::{Partial, remove_leftovers};
use crate::image::archive::Files;
use crate::image::manifest::LARGEST;
use crate::image::reference::{Archive, ArchiveFormat};
use crate::progress::Progress;
use crate::store::Store;

const MARKER: &str = "oci-layout";
const INDEX: &str = "index.json";
/// Annotation of an entry of the index: what it is called.
const NAME: &str = "org.opencontainers.image.ref.name";
/// More threads than this wait for the disk.
const THREADS: usize = 4;

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Writes a snapshot into a layout, beside what is there, or into a new archive. Returns the digest of its OCI manifest.
pub(super) fn export(
    store: &Store,
    digest: &Digest,
    to: &Archive,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    let leaving = Leaving::open(store, digest)?;
    match to.format {
        ArchiveFormat::OciLayout => export_layout(&leaving, to, progress),
        ArchiveFormat::OciArchive => export_tar(&leaving, to, progress),
        ArchiveFormat::DockerArchive => Err(Error::ArchiveFormat { archive: to.to_string() }),
    }
}

fn export_layout(leaving: &Leaving, to: &Archive, progress: &dyn Progress) -> Result<Digest, Error> {
    let blobs = to.path.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(|source| write_error(&blobs, source))?;
    for folder in [&blobs, &to.path] {
        sweep(folder);
    }
    let put = |digest: &Digest, bytes: &[u8]| {
        let path = to.path.join(blob_path(digest));
        if fs::metadata(&path).is_ok_and(|data| data.len() == bytes.len() as u64) {
            return Ok(());
        }
        put_file(&path, bytes)
    };
    let artifact = leaving.carry(THREADS, &|digest, bytes| put(digest, &bytes), progress)?;
    let bytes = artifact.bytes().map_err(|source| unusable(to, source))?;
    let digest = Digest::of(&bytes);
    put(&digest, &bytes)?;
    let index = to.path.join(INDEX);
    let old = match File::open(&index) {
        // Its other entries are somebody's, too.
        Ok(file) => serde_json::from_reader(file.take(LARGEST))
            .map_err(|source| Error::Read { path: index.clone(), source: source.into() })?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Value::Null,
        Err(source) => return Err(Error::Read { path: index, source }),
    };
    put_file(&to.path.join(MARKER), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    put_file(&index, &index_document(old, to.name.as_deref(), &digest, bytes.len()))?;
    Ok(digest)
}

fn export_tar(leaving: &Leaving, to: &Archive, progress: &dyn Progress) -> Result<Digest, Error> {
    let failed = |source| write_error(&to.path, source);
    sweep(to.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")));
    let partial = Partial::create(&to.path).map_err(failed)?;
    // What is the same several times is there once.
    let written = (std::collections::HashSet::new(), tar::Builder::new(partial.file()));
    let builder = Mutex::new(written);
    let put = |name: &str, bytes: &[u8]| {
        let mut builder = builder.lock().unwrap_or_else(PoisonError::into_inner);
        if !builder.0.insert(name.to_owned()) {
            return Ok(());
        }
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.1.append_data(&mut header, name, bytes).map_err(failed)
    };
    put(MARKER, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let artifact = leaving.carry(THREADS, &|digest, bytes| put(&blob_path(digest), &bytes), progress)?;
    let bytes = artifact.bytes().map_err(|source| unusable(to, source))?;
    let digest = Digest::of(&bytes);
    put(&blob_path(&digest), &bytes)?;
    put(INDEX, &index_document(Value::Null, to.name.as_deref(), &digest, bytes.len()))?;
    let (_, tar) = builder.into_inner().unwrap_or_else(PoisonError::into_inner);
    tar.into_inner().and_then(|mut file| file.flush()).map_err(failed)?;
    partial.commit().map_err(failed)?;
    Ok(digest)
}

/// Removes what an export that was killed has left. The folder is its user's, who may have forbidden that.
fn sweep(folder: &Path) {
    if let Err(error) = remove_leftovers(folder) {
        tracing::debug!(folder = %folder.display(), %error, "what killed exports have left stays");
    }
}

/// The index with one more entry, in place of what was called the same.
fn index_document(old: Value, name: Option<&str>, digest: &Digest, size: usize) -> Vec<u8> {
    let mut entry = json!({
        "mediaType": OCI_MANIFEST,
        "artifactType": ARTIFACT,
        "digest": digest.to_string(),
        "size": size,
    });
    if let (Some(name), Some(entry)) = (name, entry.as_object_mut()) {
        entry.insert("annotations".to_owned(), json!({ NAME: name }));
    }
    let mut manifests = old.get("manifests").and_then(Value::as_array).cloned().unwrap_or_default();
    manifests.retain(|known| {
        let same_name = name.is_some() && name_of(known) == name;
        !same_name && (name_of(known).is_some() || known.get("digest") != entry.get("digest"))
    });
    manifests.push(entry);
    let index = "application/vnd.oci.image.index.v1+json";
    json!({ "schemaVersion": 2, "mediaType": index, "manifests": manifests }).to_string().into_bytes()
}

fn name_of(entry: &Value) -> Option<&str> {
    entry.get("annotations")?.get(NAME)?.as_str()
}

/// Complete under its name, or not there.
fn put_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let put = || {
        let partial = Partial::create(path)?;
        let mut file: &File = partial.file();
        file.write_all(bytes)?;
        partial.commit()
    };
    put().map_err(|source| write_error(path, source))
}

/// Takes the one snapshot of an archive, or the one that is called by the name in `from`.
pub(super) fn import(
    snapshots: &Snapshots<'_>,
    from: &Archive,
    progress: &dyn Progress,
) -> Result<Arrival, Error> {
    let failed = |source| Error::Archive { archive: from.to_string(), source: Box::new(source) };
    let files = match from.format {
        ArchiveFormat::OciLayout => Files::directory(&from.path),
        ArchiveFormat::OciArchive => Files::tar(&from.path, &snapshots.store.layout.partial()),
        ArchiveFormat::DockerArchive => return Err(Error::ArchiveFormat { archive: from.to_string() }),
    };
    let files = files.map_err(failed)?;
    let entry = entry(&files.read(INDEX, LARGEST).map_err(failed)?, from)?;
    let read = |digest: &Digest, limit: u64| {
        let bytes = files.read(&blob_path(digest), limit).map_err(failed)?;
        let found = Digest::of(&bytes);
        if found == *digest {
            Ok(bytes)
        } else {
            Err(Error::WrongBlob { from: from.to_string(), expected: *digest, found })
        }
    };
    let artifact = Artifact::parse(&read(&entry, LARGEST)?).map_err(|source| unusable(from, source))?;
    let documents = incoming::documents(&from.to_string(), &artifact, &|blob| read(&blob.digest, blob.size))?;
    let places = incoming::places(&from.to_string(), &artifact, &documents.indexes)?;
    let fetch = |wanted: &Wanted| {
        let blob = places.get(&(wanted.digest, wanted.length)).ok_or_else(|| wrong_chunk(from, wanted))?;
        let packed = files.read(&blob_path(&blob.digest), blob.size).map_err(failed)?;
        unpack(&packed, wanted.length).ok_or_else(|| wrong_chunk(from, wanted))
    };
    let incoming = Incoming {
        digest: artifact.snapshot.digest,
        manifest: documents.manifest,
        bytes: documents.bytes,
        indexes: documents.indexes,
        from: from.to_string(),
        fetch: &fetch,
        parallel: THREADS,
    };
    receive(snapshots, &incoming, progress)
}

fn wrong_chunk(from: &Archive, wanted: &Wanted) -> Error {
    Error::WrongChunk { from: from.to_string(), part: wanted.part, at: wanted.offset }
}

fn unusable(archive: &Archive, source: super::artifact::Error) -> Error {
    Error::Artifact { from: archive.to_string(), source }
}

/// The digest of the OCI manifest that is meant.
fn entry(index: &[u8], from: &Archive) -> Result<Digest, Error> {
    let no_snapshot = || Error::NoSnapshotIn { archive: from.to_string() };
    let index: Value = serde_json::from_slice(index).map_err(|_| no_snapshot())?;
    let entries = index.get("manifests").and_then(Value::as_array).ok_or_else(no_snapshot)?;
    let is_snapshot = |entry: &&Value| entry.get("artifactType").and_then(Value::as_str) == Some(ARTIFACT);
    let is_called = |entry: &&Value| from.name.is_none() || name_of(entry) == from.name.as_deref();
    let digest = |entry: &Value| entry.get("digest")?.as_str()?.parse().ok();
    let mut found: Vec<Digest> =
        entries.iter().filter(is_snapshot).filter(is_called).filter_map(digest).collect();
    found.sort();
    found.dedup();
    match found.as_slice() {
        [one] => Ok(*one),
        [] => Err(no_snapshot()),
        several => Err(Error::SeveralIn { archive: from.to_string(), count: several.len() }),
    }
}
