//! Snapshots through files.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use imp_storage::image::reference::{Archive, ArchiveFormat};
use imp_storage::progress::Event;
use imp_storage::snapshots::artifact::Artifact;
use imp_storage::snapshots::{Error, Keeping, Part};

use crate::fixture::{CHUNK, FULL, assert_same, commit, description, draft, host, layout, leftovers, store};

#[test]
fn what_was_exported_is_imported_as_the_same_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
    let made = commit(&ours, 1);
    for format in [ArchiveFormat::OciLayout, ArchiveFormat::OciArchive] {
        let path = folder.path().join(format.prefix());
        let archive = Archive { format, path, name: None };
        ours.snapshots().export(&made.digest, &archive, &()).unwrap();
        let theirs = store(&theirs.join(format.prefix()));
        let arrival = theirs.snapshots().import(&archive, &()).unwrap();
        assert_eq!((arrival.shared, arrival.resumed), (0, 0));
        assert_eq!(arrival.fetched, (FULL - 1) * CHUNK + 5);
        assert_same(&made, &arrival.snapshot);
        theirs.snapshots().open(&made.digest, &host()).unwrap();
        // What it says of itself makes no name lead to it.
        assert_eq!(theirs.snapshots().find(&description().template.unwrap()).unwrap(), None);
        // The second time there is nothing to do.
        let again = theirs.snapshots().import(&archive, &()).unwrap();
        assert_eq!((again.fetched, again.shared, again.resumed), (0, 0, 0));
        drop((arrival, again));
        assert!(leftovers(&folder.path().join("theirs").join(format.prefix())).is_empty());
    }
}

#[test]
fn chunks_that_another_version_has_are_taken_from_there() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (store(&folder.path().join("ours")), store(&folder.path().join("theirs")));
    let (old, new) = (commit(&ours, 1), commit(&ours, 2));
    let path = folder.path().join("layout");
    ours.snapshots().export(&old.digest, &layout(&path, Some("v1")), &()).unwrap();
    ours.snapshots().export(&new.digest, &layout(&path, Some("v2")), &()).unwrap();
    theirs.snapshots().import(&layout(&path, Some("v1")), &()).unwrap();
    let arrival = theirs.snapshots().import(&layout(&path, Some("v2")), &()).unwrap();
    assert_eq!(arrival.fetched, CHUNK);
    assert_eq!(arrival.shared, (FULL - 2) * CHUNK + 5);
    assert_same(&new, &arrival.snapshot);
    theirs.snapshots().open(&new.digest, &host()).unwrap();
}

#[test]
fn a_damaged_neighbour_lends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (store(&folder.path().join("ours")), store(&folder.path().join("theirs")));
    let (old, new) = (commit(&ours, 1), commit(&ours, 2));
    let neighbour = commit(&theirs, 1);
    assert_eq!(old.digest, neighbour.digest);
    let memory = neighbour.part(Part::Memory);
    let mut bytes = fs::read(&memory).unwrap();
    bytes[5000] ^= 1;
    fs::remove_file(&memory).unwrap();
    fs::write(&memory, bytes).unwrap();
    let path = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&new.digest, &path, &()).unwrap();
    let arrival = theirs.snapshots().import(&path, &()).unwrap();
    assert_eq!(arrival.fetched, 2 * CHUNK);
    assert_same(&new, &arrival.snapshot);
}

#[test]
fn a_layout_keeps_what_it_has_and_is_asked_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let (old, new) = (commit(&ours, 1), commit(&ours, 2));
    let path = folder.path().join("layout");
    let export = |snapshot: &imp_storage::snapshots::Snapshot, name| {
        ours.snapshots().export(&snapshot.digest, &layout(&path, Some(name)), &()).unwrap()
    };
    let first = export(&old, "v1");
    let inodes = || -> std::collections::BTreeSet<u64> {
        fs::read_dir(path.join("blobs/sha256"))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().ino())
            .collect()
    };
    let before = inodes();
    assert_eq!(export(&old, "v1"), first, "the same becomes the same");
    assert_eq!(inodes(), before);
    export(&new, "v2");
    assert!(inodes().is_superset(&before));
    // Its manifest, its index of memory, its own chunk, and the OCI manifest.
    assert_eq!(inodes().len(), before.len() + 4);
    let theirs = store(&folder.path().join("theirs"));
    let several = theirs.snapshots().import(&layout(&path, None), &());
    assert!(matches!(several, Err(Error::SeveralIn { count: 2, .. })));
    let none = theirs.snapshots().import(&layout(&path, Some("v3")), &());
    assert!(matches!(none, Err(Error::NoSnapshotIn { .. })));
    assert_eq!(
        theirs.snapshots().import(&layout(&path, Some("v2")), &()).unwrap().snapshot.digest,
        new.digest
    );
    // A name that moves on.
    export(&new, "v1");
    let moved = theirs.snapshots().import(&layout(&path, Some("v1")), &()).unwrap();
    assert_eq!(moved.snapshot.digest, new.digest);
}

#[test]
fn a_local_or_damaged_snapshot_does_not_leave() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let to = layout(&folder.path().join("layout"), None);
    let local = ours.snapshots().commit(draft(&ours, 1), description(), Keeping::UntilRestart).unwrap();
    assert!(matches!(ours.snapshots().export(&local.digest, &to, &()), Err(Error::Local { .. })));
    let damaged = commit(&ours, 1);
    let memory = damaged.part(Part::Memory);
    let mut bytes = fs::read(&memory).unwrap();
    bytes[5000] ^= 1;
    fs::remove_file(&memory).unwrap();
    fs::write(&memory, bytes).unwrap();
    assert!(matches!(ours.snapshots().export(&damaged.digest, &to, &()), Err(Error::Refused { .. })));
    assert!(!to.path.join("index.json").exists());
}

#[test]
fn a_layout_whose_index_cannot_be_read_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let to = layout(&folder.path().join("layout"), None);
    let made = commit(&ours, 1);
    fs::create_dir(&to.path).unwrap();
    let index = to.path.join("index.json");
    fs::write(&index, "{\"manifests\": [").unwrap();
    let refused = ours.snapshots().export(&made.digest, &to, &());
    assert!(matches!(refused, Err(Error::Read { path, .. }) if path == index));
    assert_eq!(fs::read_to_string(&index).unwrap(), "{\"manifests\": [");
}

#[test]
fn an_interrupted_import_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    let oci = ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    // Its last chunk is gone for a while.
    let blobs = archive.path.join("blobs/sha256");
    let artifact = Artifact::parse(&fs::read(blobs.join(oci.hex())).unwrap()).unwrap();
    let chunk = blobs.join(artifact.chunks.last().unwrap().digest.hex());
    let aside = folder.path().join("aside");
    fs::rename(&chunk, &aside).unwrap();
    let theirs = store(&root);
    let failed = theirs.snapshots().import(&archive, &());
    assert!(matches!(failed, Err(Error::Archive { .. })));
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    fs::rename(&aside, &chunk).unwrap();
    // Another process goes on, whose start keeps what has arrived.
    drop(theirs);
    let theirs = store(&root);
    let last = std::sync::Mutex::new(0);
    let watch = |event: Event| {
        if let Event::Transferred { total, .. } = event {
            *last.lock().unwrap() = total;
        }
    };
    let arrival = theirs.snapshots().import(&archive, &watch).unwrap();
    assert!(arrival.resumed > 0 && arrival.fetched > 0, "{arrival:?}");
    assert_eq!(arrival.resumed + arrival.fetched, (FULL - 1) * CHUNK + 5);
    assert_eq!(*last.lock().unwrap(), arrival.fetched);
    assert_same(&made, &arrival.snapshot);
    drop(arrival);
    assert!(leftovers(&root).is_empty());
}

#[test]
fn what_an_interrupted_import_left_goes_when_the_store_is_pruned_or_it_is_old() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    let hex = made.digest.hex();
    let arriving = root.join("arriving").join(hex);
    let leave = || {
        fs::create_dir_all(&arriving).unwrap();
        fs::write(arriving.join("memory"), b"half").unwrap();
    };
    let theirs = store(&root);
    leave();
    drop(store(&root));
    assert!(arriving.exists());
    theirs.prune(imp_storage::store::PruneScope::Unnamed).unwrap();
    assert!(!arriving.exists());
    leave();
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(8 * 24 * 3600);
    fs::File::open(&arriving).unwrap().set_modified(long_ago).unwrap();
    drop(store(&root));
    assert!(!arriving.exists());
    // What is there but of another size is made anew.
    leave();
    let arrival = theirs.snapshots().import(&archive, &()).unwrap();
    assert_same(&made, &arrival.snapshot);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]
    /// A power failure may leave anything of what was written.
    #[test]
    fn whatever_an_interrupted_import_left_the_next_one_ends_with_the_same_content(
        kept in proptest::collection::vec(proptest::bool::ANY, 16),
        rubbish in proptest::collection::vec((0u64..4 << 20, 1usize..100_000, 0u8..3), 0..4),
        length in proptest::option::of(0u64..5 << 20),
        others in proptest::bool::ANY,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
        let made = commit(&ours, 1);
        let archive = layout(&folder.path().join("layout"), None);
        ours.snapshots().export(&made.digest, &archive, &()).unwrap();
        let theirs = store(&root);
        let arriving = root.join("arriving").join(made.digest.hex());
        fs::create_dir_all(&arriving).unwrap();
        let good = fs::read(made.part(Part::Memory)).unwrap();
        let file = fs::File::create(arriving.join("memory")).unwrap();
        file.set_len(good.len() as u64).unwrap();
        for (number, chunk) in good.chunks(CHUNK as usize).enumerate().filter(|(number, _)| kept[*number]) {
            file.write_all_at(chunk, number as u64 * CHUNK).unwrap();
        }
        for (offset, count, byte) in rubbish {
            let count = count.min((4 << 20) - offset as usize);
            file.write_all_at(&vec![byte; count], offset).unwrap();
        }
        if let Some(length) = length {
            file.set_len(length).unwrap();
        }
        if others {
            fs::write(arriving.join("manifest.json"), b"{}").unwrap();
            fs::write(arriving.join("memory.chunks"), b"x").unwrap();
            fs::write(arriving.join("scratch"), b"short").unwrap();
        }
        let arrival = theirs.snapshots().import(&archive, &()).unwrap();
        assert_eq!(arrival.snapshot.digest, made.digest);
        for part in [Part::Memory, Part::State, Part::Scratch] {
            assert!(fs::read(arrival.snapshot.part(part)).unwrap() == fs::read(made.part(part)).unwrap());
        }
        theirs.snapshots().verify(&made.digest).unwrap();
        drop(arrival);
        assert!(leftovers(&root).is_empty());
    }
}
