use std::os::unix::fs::MetadataExt as _;

use proptest::prelude::*;

use super::*;
use crate::blob::digest::Digest;
use crate::snapshots::chunks;

/// The index by the obvious way.
fn plainly(content: &[u8]) -> Index {
    let mut index = Index::zero(content.len() as u64).unwrap();
    for (number, chunk) in (0..).zip(content.chunks(index.chunk_size() as usize)) {
        let is_zero = chunk.iter().all(|byte| *byte == 0);
        index.set(number, (!is_zero).then(|| Digest::of(chunk)));
    }
    index
}

fn sparse(size: u64, written: &[(u64, Vec<u8>)]) -> (File, Vec<u8>) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    let mut content = vec![0; size as usize];
    for (offset, bytes) in written {
        file.write_all_at(bytes, *offset).unwrap();
        content[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
    }
    (file, content)
}

#[test]
fn zeros_that_take_room_become_holes_and_the_content_stays() {
    let mut written = vec![0; 3 << 20];
    written[1_000_000] = 1;
    written[2_000_000..2_100_000].fill(2);
    let (file, content) = sparse(4 << 20, &[(4096, written)]);
    let index = index(&file, 4 << 20, Zeros::Freed).unwrap();
    assert_eq!(index, plainly(&content));
    let mut back = vec![0; content.len()];
    file.read_exact_at(&mut back, 0).unwrap();
    assert!(back == content);
    file.sync_all().unwrap();
    assert!(file.metadata().unwrap().blocks() * 512 < 300 << 10, "{}", file.metadata().unwrap().blocks());
}

#[test]
fn a_hole_of_terabytes_is_not_read() {
    let (file, _) = sparse(0, &[]);
    file.set_len(chunks::LARGEST_PART).unwrap();
    file.write_all_at(b"x", chunks::LARGEST_PART - 1).unwrap();
    let index = index(&file, chunks::LARGEST_PART, Zeros::Kept).unwrap();
    assert_eq!(index.full().count(), 1);
}

#[test]
fn zeros_at_the_start_of_a_large_chunk_count_for_its_digest() {
    let size = chunks::SMALLEST * chunks::MOST + 1;
    let large = 2 * chunks::SMALLEST;
    let (file, _) = sparse(0, &[]);
    file.set_len(size).unwrap();
    let mut content = vec![0; large as usize];
    content[300_000..300_100].fill(7);
    file.write_all_at(&content, 5 * large).unwrap();
    let found: Vec<_> = index(&file, size, Zeros::Freed).unwrap().full().collect();
    let expected = chunks::Chunk { digest: Digest::of(&content), offset: 5 * large, length: large };
    assert_eq!(found, [expected]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn a_scan_finds_what_hashing_each_chunk_finds(
        size in 1u64..2_000_000,
        written in prop::collection::vec((0.0..1.0f64, 1usize..70_000, 0u8..3), 0..5),
        on_zeros in prop::sample::select(vec![Zeros::Kept, Zeros::Freed]),
    ) {
        let written: Vec<(u64, Vec<u8>)> = written.iter().map(|(at, length, byte)| {
            let offset = (size as f64 * at) as u64;
            (offset, vec![*byte; (*length).min((size - offset) as usize)])
        }).collect();
        let (file, content) = sparse(size, &written);
        prop_assert_eq!(index(&file, size, on_zeros).unwrap(), plainly(&content));
    }
}
