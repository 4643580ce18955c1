//! Snapshots on a file system that seals files (fs-verity): that of a node VM.

use std::fs::{self, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use imp_storage::snapshots::{Error, Keeping, Mismatch, Part};
use imp_testkit::node::{Command, NodeVm};

use crate::fixture::{assert_same, commit, description, draft, host, layout, store};

/// Far above what the tests take on a processor that another emulates.
const PATIENCE: Duration = Duration::from_secs(300);

/// What is run in the node.
const SEALED: [&str; 4] = [
    "sealed::a_sealed_snapshot_refuses_writes_and_is_known_by_its_seal",
    "sealed::a_part_that_somebody_still_writes_is_not_sealed",
    "sealed::memory_that_its_vmm_opens_for_writing_is_not_sealed",
    "sealed::what_arrives_is_sealed_and_an_arrival_that_was_sealed_in_part_goes_on",
];

#[test]
fn snapshots_are_sealed_where_the_file_system_can() {
    let node = NodeVm::builder().name("sealed").share(env!("CARGO_MANIFEST_DIR")).start().unwrap();
    let tests = std::env::current_exe().unwrap().display().to_string();
    let all = Command::new(tests)
        .arguments(["--ignored", "--exact"])
        .arguments(SEALED)
        .environment("RUST_BACKTRACE", "1")
        .environment("TMPDIR", "/data")
        .directory(env!("CARGO_MANIFEST_DIR"))
        .deadline(PATIENCE);
    let output = node.exec(all).unwrap();
    assert_eq!(output.code(), Some(0), "{}", output.text());
    assert!(output.text().contains("4 passed"), "{}", output.text());
}

#[test]
#[ignore = "run in a node by the first test of this file"]
fn a_sealed_snapshot_refuses_writes_and_is_known_by_its_seal() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("store"));
    let made = commit(&store, 1);
    assert!(store.snapshots().list().unwrap()[0].is_sealed);
    store.snapshots().open(&made.digest, &host()).unwrap();
    let memory = made.part(Part::Memory);
    fs::set_permissions(&memory, Permissions::from_mode(0o644)).unwrap();
    let refused = OpenOptions::new().write(true).open(&memory).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    // Its mode has changed and not what it holds: the seal says so, without a look at the content.
    store.snapshots().open(&made.digest, &host()).unwrap();
    // A file that has taken its place has another seal, or none.
    let mut bytes = fs::read(&memory).unwrap();
    bytes[5000] ^= 1;
    fs::remove_file(&memory).unwrap();
    fs::write(&memory, bytes).unwrap();
    let refused = store.snapshots().open(&made.digest, &host());
    let Err(Error::Refused { reason, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(reason, Mismatch::Damaged { part: Part::Memory, at: 0 });
}

#[test]
#[ignore = "run in a node by the first test of this file"]
fn a_part_that_somebody_still_writes_is_not_sealed() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("store"));
    let unfinished = draft(&store, 1);
    let writer = OpenOptions::new().write(true).open(unfinished.part(Part::Scratch)).unwrap();
    let refused = store.snapshots().commit(unfinished, description(), Keeping::Durable);
    assert!(matches!(refused, Err(Error::StillWritten { part: Part::Scratch, .. })), "{refused:?}");
    drop(writer);
    assert_eq!(store.snapshots().list().unwrap().len(), 0);
    assert_eq!(fs::read_dir(folder.path().join("store/drafts")).unwrap().count(), 0);
}

#[test]
#[ignore = "run in a node by the first test of this file"]
fn memory_that_its_vmm_opens_for_writing_is_not_sealed() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("store"));
    let mut of_qemu = description();
    of_qemu.vmm.name = "qemu".into();
    let made = store.snapshots().commit(draft(&store, 1), of_qemu, Keeping::Durable).unwrap();
    assert!(!store.snapshots().list().unwrap()[0].is_sealed);
    OpenOptions::new().write(true).open(made.part(Part::Memory)).unwrap();
    // A child of a fork is made without a seal, whatever its VMM.
    let local = store.snapshots().commit(draft(&store, 1), description(), Keeping::UntilRestart).unwrap();
    assert!(store.snapshots().list().unwrap().iter().all(|summary| !summary.is_sealed));
    store.snapshots().open(&local.digest, &host()).unwrap();
}

#[test]
#[ignore = "run in a node by the first test of this file"]
fn what_arrives_is_sealed_and_an_arrival_that_was_sealed_in_part_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    let theirs = store(&root);
    let arrival = theirs.snapshots().import(&archive, &()).unwrap();
    assert!(theirs.snapshots().list().unwrap()[0].is_sealed);
    assert_same(&made, &arrival.snapshot);
    drop(arrival);
    // What a process leaves that was killed between the seals and the name.
    let arriving = root.join("arriving").join(made.digest.hex());
    fs::rename(root.join("snapshots").join(made.digest.hex()), &arriving).unwrap();
    fs::remove_file(arriving.join("scratch")).unwrap();
    let arrival = theirs.snapshots().import(&archive, &()).unwrap();
    assert!(arrival.resumed > 0 && arrival.fetched > 0, "{arrival:?}");
    assert_same(&made, &arrival.snapshot);
    theirs.snapshots().open(&made.digest, &host()).unwrap();
}
