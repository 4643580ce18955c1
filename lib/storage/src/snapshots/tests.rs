use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};

use super::fixture::{MEMORY, commit, description, draft, host, store};
use super::*;
use crate::store::{PruneScope, StoreOptions};

/// Files and directories of snapshots that only an operation under way, or a mistake, leaves.
fn leftovers(folder: &std::path::Path) -> usize {
    ["drafts", "leases", "partial"]
        .iter()
        .map(|name| fs::read_dir(folder.join("store").join(name)).unwrap().count())
        .sum()
}

#[test]
fn what_was_committed_is_opened_with_the_same_content() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let made = commit(&store, 1);
    assert_eq!(made.manifest.description, description());
    assert_eq!(made.manifest.bytes().map(|bytes| Digest::of(&bytes)).unwrap(), made.digest);
    let opened = store.snapshots().open(&made.digest, &host()).unwrap();
    let memory = fs::read(opened.part(Part::Memory)).unwrap();
    assert_eq!(memory.len() as u64, MEMORY);
    assert!(memory[5000..15_000] == [1; 10_000] && memory[15_000..].iter().all(|byte| *byte == 0));
    assert_eq!(fs::read(opened.part(Part::State)).unwrap(), [1, 2, 3]);
    assert_eq!(fs::metadata(opened.part(Part::Scratch)).unwrap().len(), 64 << 20);
    drop((made, opened));
    assert_eq!(leftovers(folder.path()), 0);
}

#[test]
fn the_same_content_is_one_snapshot_and_other_content_another() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let (first, same, other) = (commit(&store, 1), commit(&store, 1), commit(&store, 2));
    assert_eq!(first.digest, same.digest);
    assert_ne!(first.digest, other.digest);
    assert_eq!(store.snapshots().list().unwrap().len(), 2);
    store.snapshots().open(&same.digest, &host()).unwrap();
}

#[test]
fn a_draft_that_is_dropped_or_incomplete_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    drop(draft(&store, 1));
    let incomplete = draft(&store, 1);
    fs::remove_file(incomplete.part(Part::Scratch)).unwrap();
    let refused = store.snapshots().commit(incomplete, description(), Keeping::Durable);
    assert!(matches!(refused, Err(Error::PartMissing { part: Part::Scratch, .. })));
    let linked = draft(&store, 1);
    fs::remove_file(linked.part(Part::State)).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", linked.part(Part::State)).unwrap();
    let refused = store.snapshots().commit(linked, description(), Keeping::Durable);
    assert!(matches!(refused, Err(Error::PartMissing { part: Part::State, .. })));
    let mut wrong = description();
    wrong.devices.memory += 4096;
    let refused = store.snapshots().commit(draft(&store, 1), wrong, Keeping::Durable);
    assert!(matches!(refused, Err(Error::Description(manifest::Error::Memory { .. }))));
    assert_eq!(store.snapshots().list().unwrap().len(), 0);
    assert_eq!(leftovers(folder.path()), 0);
}

#[test]
fn what_does_not_fit_on_the_disk_is_refused_with_numbers_before_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let Err(Error::NoRoom { needed, available, .. }) = store.snapshots().draft(1 << 60) else { panic!() };
    assert!(needed == 1 << 60 && available > 0 && available < needed);
    assert_eq!(leftovers(folder.path()), 0);
}

#[test]
fn a_host_that_the_guest_would_notice_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let made = commit(&store, 1);
    let mut newer = host();
    newer.vmm.version = "9".into();
    let refused = store.snapshots().open(&made.digest, &newer);
    assert!(matches!(refused, Err(Error::Refused { reason: Mismatch::Vmm { .. }, .. })));
}

/// Replaces a part by other content of the same size, as a disk that rots or a mistaken program would.
fn damage(snapshot: &Snapshot, part: Part, at: u64) {
    let path = snapshot.part(part);
    let mut content = fs::read(&path).unwrap();
    content[at as usize] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, content).unwrap();
}

#[test]
fn damage_of_each_part_is_found_and_located() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for (seed, part, at, chunk) in
        [(1, Part::Memory, 700_000, 524_288), (2, Part::State, 1, 0), (3, Part::Scratch, 33 << 20, 33 << 20)]
    {
        let made = commit(&store, seed);
        damage(&made, part, at);
        for _ in 0..2 {
            let refused = store.snapshots().open(&made.digest, &host());
            let Err(Error::Refused { reason, .. }) = refused else { panic!("{part} was accepted") };
            assert_eq!(reason, Mismatch::Damaged { part, at: chunk });
        }
    }
}

#[test]
fn truncated_missing_and_swapped_parts_have_their_reasons() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let reason = |snapshot: &Snapshot| match store.snapshots().open(&snapshot.digest, &host()) {
        Err(Error::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let truncated = commit(&store, 1);
    let path = truncated.part(Part::Memory);
    let content = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, &content[..4096]).unwrap();
    let expected = Mismatch::Size { part: Part::Memory, expected: MEMORY, found: 4096 };
    assert_eq!(reason(&truncated), expected);

    let missing = commit(&store, 2);
    fs::remove_file(missing.part(Part::State)).unwrap();
    assert_eq!(reason(&missing), Mismatch::Missing { part: Part::State });

    // Both are whole snapshots of the same sizes; only which is which is wrong.
    let (one, other) = (commit(&store, 3), commit(&store, 4));
    let aside = folder.path().join("aside");
    fs::rename(one.part(Part::Memory), &aside).unwrap();
    fs::rename(other.part(Part::Memory), one.part(Part::Memory)).unwrap();
    fs::rename(&aside, other.part(Part::Memory)).unwrap();
    assert_eq!(reason(&one), Mismatch::Damaged { part: Part::Memory, at: 0 });
    assert_eq!(reason(&other), Mismatch::Damaged { part: Part::Memory, at: 0 });

    // A whole foreign directory under this snapshot's name.
    let (named, foreign) = (commit(&store, 5), commit(&store, 6));
    let place = |snapshot: &Snapshot| store.layout.snapshot(&snapshot.digest);
    fs::remove_dir_all(place(&named)).unwrap();
    fs::rename(place(&foreign), place(&named)).unwrap();
    assert_eq!(reason(&named), Mismatch::DamagedManifest);
    assert!(matches!(store.snapshots().open(&foreign.digest, &host()), Err(Error::NoSnapshot(_))));
}

#[test]
fn files_that_only_moved_are_hashed_again_and_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let made = commit(&store, 1);
    let record = || fs::read(store.layout.verified(&made.digest)).unwrap();
    let before = record();
    let path = made.part(Part::Memory);
    let content = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, content).unwrap();
    // Its index, too, is made again.
    fs::remove_file(files::index(&store.layout.snapshot(&made.digest), Part::Memory)).unwrap();
    store.snapshots().open(&made.digest, &host()).unwrap();
    assert_ne!(record(), before);
    assert!(files::index(&store.layout.snapshot(&made.digest), Part::Memory).exists());
    let after = record();
    store.snapshots().open(&made.digest, &host()).unwrap();
    assert_eq!(record(), after);
}

#[test]
fn an_open_of_what_is_known_compares_and_hashes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(
        folder.path().join("store"),
        StoreOptions { never_sealed: vec!["firecracker".into()], ..StoreOptions::default() },
    )
    .unwrap();
    let made = commit(&store, 1);
    // The content changes, and its times are what the record says: whoever can do that can write the record.
    let path = made.part(Part::Memory);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"changed", 5000).unwrap();
    let data = fs::metadata(&path).unwrap();
    let place = store.layout.verified(&made.digest);
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&place).unwrap()).unwrap();
    let pinned = &mut record["memory"]["pinned"];
    pinned["modified"] = serde_json::json!([data.mtime(), data.mtime_nsec()]);
    pinned["changed"] = serde_json::json!([data.ctime(), data.ctime_nsec()]);
    fs::write(&place, record.to_string()).unwrap();
    store.snapshots().open(&made.digest, &host()).unwrap();
    // A look at the content finds it.
    let refused = store.snapshots().verify(&made.digest);
    assert!(matches!(refused, Err(Error::Refused { reason: Mismatch::Damaged { at: 0, .. }, .. })));
}

#[test]
fn a_local_snapshot_is_good_until_the_machine_restarts_or_a_file_changes() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let local =
        |seed| store.snapshots().commit(draft(&store, seed), description(), Keeping::UntilRestart).unwrap();
    let (changed, restarted, good) = (local(1), local(1), local(1));
    assert_ne!(changed.digest, good.digest);
    let reason = |snapshot: &Snapshot| match store.snapshots().open(&snapshot.digest, &host()) {
        Err(Error::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    OpenOptions::new().write(true).open(changed.part(Part::Scratch)).unwrap().write_all_at(b"x", 0).unwrap();
    assert_eq!(reason(&changed), Mismatch::Changed { part: Part::Scratch });
    let place = store.layout.verified(&restarted.digest);
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&place).unwrap()).unwrap();
    record["boot"] = "another".into();
    fs::write(&place, record.to_string()).unwrap();
    assert_eq!(reason(&restarted), Mismatch::Restarted);
    store.snapshots().open(&good.digest, &host()).unwrap();
    // The next start clears away what a restart has made useless.
    let (restarted, good) = (restarted.digest, good.digest);
    drop(fixture::store(folder.path()));
    let found: Vec<Digest> = store.snapshots().list().unwrap().iter().map(|it| it.digest).collect();
    assert!(!found.contains(&restarted) && found.contains(&good));
}

#[test]
fn a_template_leads_to_its_newest_snapshot_and_the_old_one_stays_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let snapshots = store.snapshots();
    let template = Digest::of(b"template");
    assert_eq!(snapshots.find(&template).unwrap(), None);
    assert!(matches!(snapshots.name(&template, &Digest::of(b"none")), Err(Error::NoSnapshot(_))));
    let (old, new) = (commit(&store, 1).digest, commit(&store, 2).digest);
    snapshots.name(&template, &old).unwrap();
    assert_eq!(snapshots.find(&template).unwrap(), Some(old));
    snapshots.name(&template, &new).unwrap();
    assert_eq!(snapshots.find(&template).unwrap(), Some(new));
    snapshots.open(&old, &host()).unwrap();
    assert_eq!(snapshots.resolve(&old.hex()[..12]).unwrap(), old);
    assert!(matches!(snapshots.resolve("abc"), Err(Error::NoSnapshot(_))));
    // The old one has no name and goes; with the new one goes its name.
    assert_eq!(store.prune(PruneScope::Unnamed).unwrap().snapshots, [old]);
    assert!(snapshots.remove(&new).unwrap() > 0);
    assert_eq!(snapshots.find(&template).unwrap(), None);
}

#[test]
fn a_template_that_is_forgotten_goes_when_the_last_machine_made_of_it_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let snapshots = store.snapshots();
    let template = Digest::of(b"template");
    let digest = commit(&store, 1).digest;
    snapshots.name(&template, &digest).unwrap();
    store.pin(&digest, "vm-1").unwrap();
    snapshots.forget(&template).unwrap();
    snapshots.forget(&template).unwrap();
    assert_eq!(snapshots.find(&template).unwrap(), None);
    assert_eq!(store.prune(PruneScope::Unnamed).unwrap().snapshots, []);
    store.unpin(&digest, "vm-1").unwrap();
    assert_eq!(store.prune(PruneScope::Unnamed).unwrap().snapshots, [digest]);
}

#[test]
fn nothing_in_use_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let snapshots = store.snapshots();
    let made = commit(&store, 1);
    let digest = made.digest;
    assert!(matches!(snapshots.remove(&digest), Err(Error::InUse { .. })));
    assert_eq!(store.prune(PruneScope::Unused).unwrap().snapshots, []);
    store.pin(&digest, "vm-1").unwrap();
    drop(made);
    let Err(Error::InUse { owners, .. }) = snapshots.remove(&digest) else { panic!() };
    assert_eq!(owners, ["vm-1"]);
    assert_eq!(store.prune(PruneScope::Unused).unwrap().snapshots, []);
    assert_eq!(snapshots.list().unwrap()[0].pinned_by, ["vm-1"]);
    store.unpin_all("vm-1").unwrap();
    assert_eq!(store.prune(PruneScope::Unused).unwrap().snapshots, [digest]);
    assert!(matches!(snapshots.remove(&digest), Err(Error::NoSnapshot(_))));
}

#[test]
fn a_vm_that_is_put_away_is_never_cleaned_up() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let description = Description { kind: manifest::Kind::Suspend, template: None, ..fixture::description() };
    let away = store.snapshots().commit(fixture::draft(&store, 1), description, Keeping::Durable).unwrap();
    let digest = away.digest;
    drop(away);
    for scope in [PruneScope::Unnamed, PruneScope::Unused] {
        assert_eq!(store.prune(scope).unwrap().snapshots, []);
    }
    assert!(store.snapshots().remove(&digest).unwrap() > 0);
}

#[test]
fn the_least_recently_used_snapshot_makes_room_for_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let options = StoreOptions { size_limit: Some(100 << 10), ..StoreOptions::default() };
    let store = Store::open(folder.path().join("store"), options).unwrap();
    let first = commit(&store, 1).digest;
    let bytes = store.snapshots().list().unwrap()[0].bytes;
    assert!(bytes > 20 << 10 && bytes < 50 << 10, "{bytes}");
    let second = commit(&store, 2).digest;
    drop(store.snapshots().open(&first, &host()).unwrap());
    let newest = commit(&store, 3);
    let found: Vec<Digest> = store.snapshots().list().unwrap().iter().map(|it| it.digest).collect();
    assert!(found.contains(&newest.digest) && !found.contains(&second), "{found:?}");
}

#[test]
fn the_next_start_removes_what_a_dead_maker_left_and_nothing_of_a_living_one() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let living = draft(&store, 1);
    let dead = draft(&store, 2);
    let (directory, lock) = (dead.directory().to_owned(), dead.directory().with_extension("lock"));
    // What a killed process leaves: its files, without their lock.
    let aside = folder.path().join("aside");
    fs::rename(&directory, &aside).unwrap();
    drop(dead);
    fs::rename(&aside, &directory).unwrap();
    fs::write(&lock, "").unwrap();
    let gone = store.layout.drafts().join("gone-x");
    fs::create_dir(&gone).unwrap();
    drop(fixture::store(folder.path()));
    assert!(!directory.exists() && !lock.exists() && !gone.exists());
    let made = store.snapshots().commit(living, description(), Keeping::Durable).unwrap();
    store.snapshots().open(&made.digest, &host()).unwrap();
}
