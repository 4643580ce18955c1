//! What holds whatever is in a snapshot: it arrives as it left, and nothing travels twice.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use imp_storage::snapshots::{Keeping, Part, Snapshot};
use imp_storage::store::Store;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fixture::{CHUNK, MEMORY, assert_same_within, description, host, layout, leftovers, store};

/// A snapshot whose memory has these contents, one for each chunk; 0 is zeros.
fn made_of(store: &Store, chunks: &[u8], state: &[u8]) -> Snapshot {
    let draft = store.snapshots().draft(MEMORY).unwrap();
    let memory = File::create(draft.part(Part::Memory)).unwrap();
    memory.set_len(MEMORY).unwrap();
    for (number, content) in chunks.iter().enumerate() {
        // Written as zeros, too, and not all of a chunk.
        memory.write_all_at(&vec![*content; CHUNK as usize / 2], number as u64 * CHUNK).unwrap();
    }
    fs::write(draft.part(Part::State), state).unwrap();
    File::create(draft.part(Part::Scratch)).unwrap().set_len(64 << 20).unwrap();
    store.snapshots().commit(draft, description(), Keeping::Durable).unwrap()
}

fn contents(chunks: &[u8]) -> BTreeSet<u8> {
    chunks.iter().copied().filter(|content| *content != 0).collect()
}

const CHUNKS: usize = (MEMORY / CHUNK) as usize;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn whatever_two_versions_hold_both_arrive_whole_and_no_content_travels_twice(
        old in vec(0u8..6, CHUNKS),
        new in vec(0u8..8, CHUNKS),
        states in (vec(1u8..=255, 1..50), vec(1u8..=255, 51..100)),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
        let theirs = store(&root);
        let versions = [made_of(&ours, &old, &states.0), made_of(&ours, &new, &states.1)];
        let mut known = BTreeSet::new();
        for (made, (chunks, state)) in versions.iter().zip([(&old, &states.0), (&new, &states.1)]) {
            let archive = layout(&folder.path().join("layout"), Some("version"));
            ours.snapshots().export(&made.digest, &archive, &()).unwrap();
            let arrival = theirs.snapshots().import(&archive, &()).unwrap();
            let there = chunks.iter().filter(|content| **content != 0).count() as u64;
            assert_same_within(made, &arrival.snapshot, there * CHUNK);
            let wanted = contents(chunks);
            let fetched = wanted.difference(&known).count() as u64 * CHUNK + state.len() as u64;
            prop_assert_eq!(arrival.fetched, fetched);
            prop_assert_eq!(arrival.shared, wanted.intersection(&known).count() as u64 * CHUNK);
            known.extend(wanted);
            theirs.snapshots().open(&made.digest, &host()).unwrap();
            theirs.snapshots().verify(&made.digest).unwrap();
        }
        prop_assert!(leftovers(&root).is_empty());
    }
}
