use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

fn store() -> (tempfile::TempDir, BlobStore) {
    let root = tempfile::tempdir().unwrap();
    let store = BlobStore::open(root.path().join("blobs"), root.path().join("partial")).unwrap();
    (root, store)
}

fn started(store: &BlobStore, digest: &Digest, size: u64) -> Partial {
    match store.begin(digest, size).unwrap() {
        Begin::Started(partial) => *partial,
        other => panic!("{other:?}"),
    }
}

fn leftovers(store: &BlobStore) -> usize {
    fs::read_dir(&store.partial).unwrap().count()
}

#[test]
fn a_blob_has_its_name_only_when_it_is_whole() {
    let (_root, store) = store();
    let digest = Digest::of(b"hello");
    let mut partial = started(&store, &digest, 5);
    partial.write(b"hel").unwrap();
    assert_eq!(store.size(&digest).unwrap(), None);
    partial.write(b"lo").unwrap();
    assert_eq!(store.size(&digest).unwrap(), None);
    partial.finish().unwrap();
    assert_eq!(store.read(&digest, 10).unwrap(), b"hello");
    assert_eq!(store.list().unwrap(), [(digest, 5)]);
    assert_eq!(leftovers(&store), 0);
}

#[test]
fn what_is_wrong_is_a_typed_error_and_leaves_no_file() {
    let (_root, store) = store();
    let digest = Digest::of(b"hello");
    let mut wrong = started(&store, &digest, 5);
    wrong.write(b"hellO").unwrap();
    assert!(matches!(wrong.finish(), Err(Error::WrongDigest { .. })));
    let mut short = started(&store, &digest, 5);
    short.write(b"hell").unwrap();
    assert!(matches!(short.finish(), Err(Error::Truncated { expected: 5, found: 4, .. })));
    let mut long = started(&store, &digest, 5);
    long.write(b"hello").unwrap();
    assert!(matches!(long.write(b"!"), Err(Error::Oversize { expected: 5, .. })));
    drop(long);
    assert_eq!(leftovers(&store), 0);
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn a_restarted_write_begins_with_nothing() {
    let (_root, store) = store();
    let digest = Digest::of(b"hello");
    let mut partial = started(&store, &digest, 5);
    partial.write(b"jell").unwrap();
    partial.restart().unwrap();
    partial.write(b"hello").unwrap();
    partial.finish().unwrap();
    assert_eq!(store.read(&digest, 10).unwrap(), b"hello");
}

#[test]
fn of_many_writers_at_once_one_writes() {
    let (_root, store) = store();
    let content = vec![7; 1 << 20];
    let digest = Digest::of(&content);
    let (writers, together) = (AtomicUsize::new(0), Barrier::new(8));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                together.wait();
                if let Some(mut partial) = Partial::wait(&store, &digest, 1 << 20).unwrap() {
                    writers.fetch_add(1, Ordering::SeqCst);
                    partial.write(&content).unwrap();
                    partial.finish().unwrap();
                }
                assert_eq!(store.size(&digest).unwrap(), Some(1 << 20));
            });
        }
    });
    assert_eq!(writers.into_inner(), 1);
    assert_eq!(leftovers(&store), 0);
}

#[test]
fn a_writer_who_gives_up_lets_the_next_one_write() {
    let (_root, store) = store();
    let digest = Digest::of(b"hello");
    let first = started(&store, &digest, 5);
    assert!(matches!(store.begin(&digest, 5).unwrap(), Begin::Busy(0)));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| Partial::wait(&store, &digest, 5).unwrap());
        drop(first);
        let mut second = second.join().unwrap().unwrap();
        second.write(b"hello").unwrap();
        second.finish().unwrap();
    });
}

#[test]
fn a_sweep_takes_leftovers_and_not_what_is_being_written() {
    let (_root, store) = store();
    let living = started(&store, &Digest::of(b"living"), 6);
    fs::write(store.partial.join(Digest::of(b"dead").hex()), b"de").unwrap();
    fs::write(store.partial.join("other"), b"").unwrap();
    assert_eq!(store.sweep().unwrap(), 2);
    assert_eq!(leftovers(&store), 1);
    drop(living);
    assert_eq!(leftovers(&store), 0);
}

#[test]
fn a_damaged_blob_is_not_handed_out() {
    let (_root, store) = store();
    let digest = store.put(b"hello").unwrap();
    fs::write(store.path(&digest), b"jello").unwrap();
    assert!(matches!(store.read(&digest, 10), Err(Error::Damaged { .. })));
    assert!(matches!(store.read(&digest, 4), Err(Error::TooLarge { .. })));
}
