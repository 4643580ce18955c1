//! Archives that were made to do harm, or are damaged: each has its reason, and nothing of it is seen in the store.

use std::fs;
use std::path::{Path, PathBuf};

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::artifact::{self, Artifact, Blob};
use imp_storage::snapshots::{Error, Manifest, Mismatch, Part};
use serde_json::{Value, json};

use crate::fixture::{CHUNK, commit, content, host, layout, store};

/// A layout whose one snapshot can be changed.
struct Layout {
    folder: tempfile::TempDir,
    artifact: Artifact,
    manifest: Manifest,
}

impl Layout {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ours = store(&folder.path().join("ours"));
        let made = commit(&ours, 1);
        let path = folder.path().join("layout");
        let oci = ours.snapshots().export(&made.digest, &layout(&path, None), &()).unwrap();
        let artifact = Artifact::parse(&fs::read(blob(&path, &oci)).unwrap()).unwrap();
        let manifest = made.manifest.clone();
        Self { folder, artifact, manifest }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("layout")
    }

    fn put(&self, media_type: &str, bytes: &[u8]) -> Blob {
        let digest = Digest::of(bytes);
        fs::write(blob(&self.path(), &digest), bytes).unwrap();
        Blob { media_type: media_type.to_owned(), digest, size: bytes.len() as u64 }
    }

    /// Imports what the OCI manifest says now.
    fn import(&self, oci: &[u8]) -> Error {
        self.name(oci);
        self.import_as_it_is()
    }

    /// Makes the layout's one entry lead to this OCI manifest.
    fn name(&self, oci: &[u8]) {
        let named = self.put("", oci);
        let entry = json!({
            "mediaType": artifact::OCI_MANIFEST, "artifactType": artifact::ARTIFACT,
            "digest": named.digest.to_string(), "size": named.size,
        });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] });
        fs::write(self.path().join("index.json"), index.to_string()).unwrap();
    }

    fn import_as_it_is(&self) -> Error {
        let theirs = store(&self.folder.path().join("theirs"));
        let refused = theirs.snapshots().import(&layout(&self.path(), None), &());
        assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
        assert!(content(&self.folder.path().join("theirs/snapshots")).is_empty());
        refused.expect_err("a hostile archive was taken")
    }

    fn import_artifact(&self, change: impl FnOnce(&mut Artifact)) -> Error {
        let mut artifact = self.artifact.clone();
        change(&mut artifact);
        self.import(&artifact.bytes().unwrap())
    }

    fn import_manifest(&self, change: impl FnOnce(&mut Value)) -> Error {
        let mut manifest = serde_json::to_value(&self.manifest).unwrap();
        change(&mut manifest);
        let blob = self.put(artifact::MANIFEST, manifest.to_string().as_bytes());
        self.import_artifact(|artifact| artifact.snapshot = blob)
    }
}

fn blob(layout: &Path, digest: &Digest) -> PathBuf {
    layout.join("blobs/sha256").join(digest.hex())
}

#[test]
fn content_that_is_not_what_its_digest_says_is_refused() {
    let layout = Layout::new();
    let [first, ..] = layout.artifact.chunks.as_slice() else { panic!() };
    for damaged in [&layout.artifact.snapshot, &layout.artifact.indexes[0], first] {
        let path = blob(&layout.path(), &damaged.digest);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        fs::write(&path, &bad).unwrap();
        let error = layout.import_as_it_is();
        let expected =
            matches!(error, Error::WrongBlob { .. } | Error::WrongChunk { part: Part::Memory, at: 0, .. });
        assert!(expected, "{error}");
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        let error = layout.import_as_it_is();
        let expected = matches!(error, Error::WrongBlob { .. } | Error::WrongChunk { .. });
        assert!(expected, "{error}");
        fs::write(&path, good).unwrap();
    }
}

#[test]
fn chunks_that_are_swapped_missing_or_too_many_are_refused() {
    let layout = Layout::new();
    let error = layout.import_artifact(|artifact| artifact.chunks.swap(0, 1));
    assert!(matches!(error, Error::WrongChunk { part: Part::Memory, .. }), "{error}");
    let error = layout.import_artifact(|artifact| drop(artifact.chunks.pop()));
    let counts = |error: &Error| match error {
        Error::Artifact { source: artifact::Error::Chunks { expected, found }, .. } => (*expected, *found),
        _ => panic!("{error}"),
    };
    assert_eq!(counts(&error), (10, 9));
    let error = layout.import_artifact(|artifact| artifact.chunks.push(artifact.chunks[0].clone()));
    assert_eq!(counts(&error), (10, 11));
}

#[test]
fn a_bomb_in_place_of_a_chunk_is_refused() {
    let layout = Layout::new();
    let bomb = layout.put(artifact::CHUNK, &zstd::bulk::compress(&vec![1; 64 << 20], 3).unwrap());
    let error = layout.import_artifact(|artifact| artifact.chunks[0] = bomb);
    assert!(matches!(error, Error::WrongChunk { part: Part::Memory, at: 0, .. }), "{error}");
}

#[test]
fn sizes_that_do_not_add_up_are_refused() {
    let layout = Layout::new();
    let error = layout.import_artifact(|artifact| artifact.chunks[0].size = 1 << 40);
    assert!(matches!(error, Error::Artifact { source: artifact::Error::Size { .. }, .. }), "{error}");
    let error = layout.import_artifact(|artifact| artifact.chunks[0].size = 2 * CHUNK);
    assert!(matches!(error, Error::Artifact { source: artifact::Error::Size { .. }, .. }), "{error}");
    let error = layout.import_artifact(|artifact| artifact.indexes[1].size = 64);
    assert!(
        matches!(error, Error::Artifact { source: artifact::Error::Index { part: Part::State, .. }, .. }),
        "{error}"
    );
    let error = layout.import_artifact(|artifact| artifact.indexes.swap(0, 2));
    assert!(matches!(error, Error::Artifact { source: artifact::Error::Index { .. }, .. }), "{error}");
    let error = layout.import_manifest(|manifest| manifest["parts"]["memory"]["size"] = json!(8 << 20));
    assert!(matches!(error, Error::Manifest { .. }), "{error}");
    // Of a scratch disk with another size the index has another length.
    let error = layout.import_manifest(|manifest| manifest["parts"]["scratch"]["size"] = json!(1u64 << 38));
    assert!(matches!(error, Error::Manifest { .. }), "{error}");
    let error = layout.import_manifest(|manifest| manifest["parts"]["state"]["size"] = json!(CHUNK + 1));
    assert!(matches!(error, Error::Artifact { source: artifact::Error::Index { .. }, .. }), "{error}");
}

#[test]
fn a_manifest_that_is_written_in_another_way_keeps_its_digest() {
    let layout = Layout::new();
    let pretty = serde_json::to_vec_pretty(&serde_json::to_value(&layout.manifest).unwrap()).unwrap();
    let digest = Digest::of(&pretty);
    let mut artifact = layout.artifact.clone();
    artifact.snapshot = layout.put(artifact::MANIFEST, &pretty);
    layout.name(&artifact.bytes().unwrap());
    let theirs = store(&layout.folder.path().join("theirs"));
    let import = || theirs.snapshots().import(&crate::fixture::layout(&layout.path(), None), &()).unwrap();
    assert_eq!(import().snapshot.digest, digest);
    theirs.snapshots().open(&digest, &host()).unwrap();
    assert_eq!(import().fetched, 0);
    // And it leaves as it came.
    let again = crate::fixture::layout(&layout.folder.path().join("again"), None);
    theirs.snapshots().export(&digest, &again, &()).unwrap();
    assert_eq!(fs::read(blob(&again.path, &digest)).unwrap(), pretty);
}

#[test]
fn what_is_no_snapshot_or_one_of_another_time_is_refused() {
    let layout = Layout::new();
    let error = layout.import_manifest(|manifest| manifest["format"] = json!(2));
    assert!(matches!(error, Error::Refused { reason: Mismatch::Format { found: 2 }, .. }), "{error}");
    let error = layout.import_manifest(|manifest| {
        manifest["local"] = json!("x");
        for part in ["memory", "state", "scratch"] {
            manifest["parts"][part].as_object_mut().unwrap().remove("chunks");
        }
    });
    assert!(matches!(error, Error::Local { .. }), "{error}");
    let image = json!({
        "schemaVersion": 2, "mediaType": artifact::OCI_MANIFEST, "layers": [],
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "size": 2,
                    "digest": Digest::of(b"{}").to_string() },
    });
    let error = layout.import(image.to_string().as_bytes());
    assert!(matches!(error, Error::Artifact { source: artifact::Error::NotASnapshot { .. }, .. }), "{error}");
    let error = layout.import(b"[]");
    assert!(matches!(error, Error::Artifact { source: artifact::Error::Json(_), .. }), "{error}");
}
