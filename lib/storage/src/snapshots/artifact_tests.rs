use proptest::prelude::*;

use super::*;
use crate::image::hostile_json::changed;

fn blob(media_type: &str, name: &str, size: u64) -> Blob {
    Blob { media_type: media_type.to_owned(), digest: Digest::of(name.as_bytes()), size }
}

fn artifact() -> Artifact {
    Artifact {
        snapshot: blob(MANIFEST, "manifest", 1000),
        indexes: ["memory", "state", "scratch"].map(|part| blob(INDEX, part, 64)),
        chunks: (0..3).map(|number| blob(CHUNK, &number.to_string(), 5000)).collect(),
    }
}

fn indexes() -> Indexes {
    let mut memory = Index::zero(4 * chunks::SMALLEST).unwrap();
    let digest = |name: &str| Some(Digest::of(name.as_bytes()));
    memory.set(1, digest("a"));
    memory.set(2, digest("b"));
    memory.set(3, digest("a"));
    let mut state = Index::zero(10).unwrap();
    state.set(0, digest("a"));
    let mut scratch = Index::zero(2 * chunks::SMALLEST).unwrap();
    scratch.set(1, digest("b"));
    [(Part::Memory, memory), (Part::State, state), (Part::Scratch, scratch)]
}

#[test]
fn bytes_and_back_are_the_same_artifact() {
    assert_eq!(Artifact::parse(&artifact().bytes().unwrap()).unwrap(), artifact());
}

#[test]
fn each_content_is_carried_once_wherever_it_is() {
    let found: Vec<_> =
        distinct(&indexes()).iter().map(|it| (it.digest, it.part, it.offset, it.length)).collect();
    let (a, b, chunk) = (Digest::of(b"a"), Digest::of(b"b"), chunks::SMALLEST);
    // A digest with another length is another promise: one of the two will turn out to be a lie.
    let expected =
        [(a, Part::Memory, chunk, chunk), (b, Part::Memory, 2 * chunk, chunk), (a, Part::State, 0, 10)];
    assert_eq!(found, expected);
    assert_eq!(artifact().chunks_of(&indexes()).unwrap().len(), 3);
}

#[test]
fn the_largest_snapshot_fits_into_a_manifest_that_registries_take() {
    let mut artifact = artifact();
    let largest = largest_packed(chunks::LARGEST);
    let count = 2 * chunks::MOST;
    artifact.chunks = (0..count).map(|number| blob(CHUNK, &number.to_string(), largest)).collect();
    artifact.bytes().unwrap();
}

proptest! {
    #[test]
    fn no_changed_value_makes_the_parser_panic(
        text in changed(&String::from_utf8(artifact().bytes().unwrap()).unwrap()),
    ) {
        if let Ok(artifact) = Artifact::parse(text.as_bytes()) {
            prop_assert!(artifact.snapshot.size <= manifest::LARGEST);
            prop_assert!(artifact.chunks.iter().all(|chunk| chunk.size <= largest_packed(chunks::LARGEST)));
        }
    }
}
