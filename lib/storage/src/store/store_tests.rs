use super::lock::{StoreLock, leased};
use super::records::{ImageRecord, NameRecord};
use super::*;

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store"), StoreOptions::default()).unwrap();
    (folder, store)
}

fn record(name: &str) -> ImageRecord {
    ImageRecord {
        digest: Digest::of(name.as_bytes()),
        manifest_size: 1,
        config: Digest::of(b"config"),
        config_size: 2,
        layers: Vec::new(),
        platform: Platform::host(),
        created: None,
        stored: 7,
    }
}

#[test]
fn a_lease_holds_while_it_lives_and_a_dead_one_is_removed() {
    let (_folder, store) = store();
    let digest = |name: &str| Digest::of(name.as_bytes());
    let lease = Lease::on(&store.layout, &[digest("a")]).unwrap();
    lease.hold(&[digest("b")]).unwrap();
    let dead = store.layout.leases().join("1-dead");
    fs::write(&dead, format!("{}\n", digest("c").hex())).unwrap();
    let removing = StoreLock::exclusive(&store.layout).unwrap();
    assert_eq!(leased(&store.layout, &removing).unwrap(), [digest("a"), digest("b")]);
    assert!(!dead.exists());
    drop(lease);
    assert_eq!(leased(&store.layout, &removing).unwrap(), []);
}

#[test]
fn nobody_removes_while_someone_looks_and_the_other_way_round() {
    let (_folder, store) = store();
    let using = StoreLock::shared(&store.layout).unwrap();
    let also_using = StoreLock::shared(&store.layout).unwrap();
    assert!(StoreLock::try_exclusive(&store.layout).unwrap().is_none());
    drop((using, also_using));
    let _removing = StoreLock::try_exclusive(&store.layout).unwrap().unwrap();
    assert!(StoreLock::try_exclusive(&store.layout).unwrap().is_none());
}

#[test]
fn a_damaged_record_counts_as_missing() {
    let (_folder, store) = store();
    let using = StoreLock::shared(&store.layout).unwrap();
    let (good, bad) = (record("good"), record("bad"));
    for record in [&good, &bad] {
        records::write_image(&store.layout, record, &using).unwrap();
    }
    fs::write(store.layout.image(&bad.digest), b"{\"digest\":").unwrap();
    assert_eq!(records::images(&store.layout).unwrap(), std::slice::from_ref(&good));
    assert_eq!(records::image(&store.layout, &good.digest).unwrap(), Some(good));
    assert_eq!(records::image(&store.layout, &bad.digest).unwrap(), None);
}

#[test]
fn a_name_that_leads_nowhere_is_forgotten_by_the_next_prune() {
    let (_folder, store) = store();
    let name: Reference = "gone:1".parse().unwrap();
    let leads_to = NameRecord { name: name.clone(), image: Digest::of(b"gone"), target: Digest::of(b"gone") };
    records::write_name(&store.layout, &leads_to, &StoreLock::shared(&store.layout).unwrap()).unwrap();
    assert!(matches!(store.resolve("gone:1"), Err(Error::NoImage(_))));
    assert_eq!(store.prune(PruneScope::Unnamed).unwrap().names, [name]);
}

#[test]
fn a_short_id_that_means_several_images_lists_them() {
    let (_folder, store) = store();
    let using = StoreLock::shared(&store.layout).unwrap();
    let mut names = (0..).map(|number| record(&number.to_string()));
    let first = names.next().unwrap();
    let twin = names.find(|it| it.digest.hex()[..4] == first.digest.hex()[..4]).unwrap();
    for record in [&first, &twin] {
        records::write_image(&store.layout, record, &using).unwrap();
    }
    let ambiguous = stored::find(&store, &first.digest.hex()[..4]);
    assert!(matches!(ambiguous, Err(Error::Ambiguous { candidates, .. }) if candidates.len() == 2));
    assert_eq!(stored::find(&store, &twin.digest.hex()).unwrap().1, twin.digest);
    assert!(matches!(stored::find(&store, &first.digest.hex()[..3]), Err(Error::NoImage(_))));
}
