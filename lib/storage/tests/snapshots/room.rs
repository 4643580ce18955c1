//! Disks that are full, or become so.

use std::fs;

use imp_storage::progress::Event;
use imp_storage::snapshots::{Error, Keeping, Part};
use imp_testkit::small_disk::SmallDisk;

use crate::fixture::{assert_same, commit, content, description, draft, host, layout, leftovers, store};

#[test]
fn an_import_that_does_not_fit_is_refused_with_numbers_before_a_chunk_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    let root = folder.path().join("small");
    fs::create_dir(&root).unwrap();
    let disk = SmallDisk::mount(&root, "1m").unwrap();
    let theirs = store(&root);
    let untouched = |event: Event| panic!("{event:?}");
    let refused = theirs.snapshots().import(&archive, &untouched);
    let Err(Error::NoRoom { needed, available, .. }) = refused else { panic!("{refused:?}") };
    assert!(needed > 2 << 20 && available <= 1 << 20);
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    assert!(fs::read_dir(root.join("arriving")).unwrap().next().is_none());
    disk.resize("8m").unwrap();
    let arrival = theirs.snapshots().import(&archive, &()).unwrap();
    assert_same(&made, &arrival.snapshot);
}

#[test]
fn a_disk_that_fills_during_an_import_ends_it_and_it_goes_on_when_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let ours = store(&folder.path().join("ours"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    let root = folder.path().join("small");
    fs::create_dir(&root).unwrap();
    let disk = SmallDisk::mount(&root, "4m").unwrap();
    let theirs = store(&root);
    let fill = |event: Event| {
        if matches!(event, Event::Transferred { .. }) {
            let _ = fs::write(root.join("filler"), vec![1; 4 << 20]);
        }
    };
    let failed = theirs.snapshots().import(&archive, &fill);
    assert!(matches!(failed, Err(Error::DiskFull { .. })), "{failed:?}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    fs::remove_file(root.join("filler")).unwrap();
    disk.resize("8m").unwrap();
    let arrival = theirs.snapshots().import(&archive, &()).unwrap();
    assert!(arrival.resumed > 0);
    assert_same(&made, &arrival.snapshot);
    theirs.snapshots().open(&made.digest, &host()).unwrap();
}

#[test]
fn a_disk_that_fills_during_a_commit_leaves_no_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("small");
    fs::create_dir(&root).unwrap();
    let disk = SmallDisk::mount(&root, "8m").unwrap();
    let store = store(&root);
    let draft_of_one = draft(&store, 1);
    let _ = fs::write(root.join("filler"), vec![1; 8 << 20]);
    let failed = store.snapshots().commit(draft_of_one, description(), Keeping::Durable);
    assert!(failed.is_err(), "{failed:?}");
    assert!(content(&root.join("snapshots")).is_empty());
    assert!(content(&root.join("drafts")).is_empty());
    fs::remove_file(root.join("filler")).unwrap();
    let made = commit(&store, 1);
    assert_eq!(fs::read(made.part(Part::State)).unwrap(), b"state");
    drop(made);
    assert!(leftovers(&root).is_empty());
    drop(store);
    drop(disk);
}
