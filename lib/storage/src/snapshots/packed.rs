//! Chunks as they travel: compressed, each alone, and of a length that is known before.

use std::io;

/// Level of zstd: higher ones take longer than the networks between machines of a cluster.
const LEVEL: i32 = 3;

/// The same bytes become the same bytes, as long as the library's version is the same.
pub(super) fn pack(content: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(content, LEVEL)
}

/// None unless the packed bytes are exactly `length` bytes of content.
pub(super) fn unpack(packed: &[u8], length: u64) -> Option<Vec<u8>> {
    let capacity = usize::try_from(length).ok()?;
    let content = zstd::bulk::decompress(packed, capacity).ok()?;
    (content.len() == capacity).then_some(content)
}

/// Most bytes that content of so many bytes becomes: what does not compress grows a little.
pub(super) const fn largest_packed(length: u64) -> u64 {
    length + length / 128 + (64 << 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bomb_is_not_unpacked() {
        let bomb = pack(&vec![0; 1 << 20]).unwrap();
        assert!(bomb.len() < 200);
        assert_eq!(unpack(&bomb, 1 << 16), None);
        assert_eq!(unpack(&bomb, (1 << 20) + 1), None);
        assert!(unpack(&bomb, 1 << 20).is_some());
    }

    proptest! {
        #[test]
        fn content_comes_back(content in prop::collection::vec(any::<u8>(), 0..5000)) {
            let packed = pack(&content).unwrap();
            prop_assert!(packed.len() as u64 <= largest_packed(content.len() as u64));
            prop_assert_eq!(unpack(&packed, content.len() as u64), Some(content));
        }

        #[test]
        fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..200), length in 0u64..10_000) {
            if let Some(content) = unpack(&noise, length) {
                prop_assert_eq!(content.len() as u64, length);
            }
        }
    }
}
