//! The half-MD4 hash by which indexed directories are ordered (`fs/ext4/hash.c`), on unsigned characters.

const START: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];

/// Orders the names of an indexed directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NameHash {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// Half MD4 of `name`; the lowest bit of `major` is clear, it marks continued blocks.
pub(super) fn half_md4(name: &[u8], seed: &[u32; 4]) -> NameHash {
    let mut state = if seed.iter().all(|word| *word == 0) { START } else { *seed };
    let mut rest = name;
    while !rest.is_empty() {
        transform(&mut state, &words(rest));
        rest = rest.get(32..).unwrap_or(&[]);
    }
    let [_, major, minor, _] = state;
    let mut major = major & !1;
    if major == 0xffff_fffe {
        // The value that means "end of directory" to a reader.
        major = 0xffff_fffc;
    }
    NameHash { major, minor }
}

/// The next 32 bytes as eight words; what is missing is filled with the length of the rest.
fn words(rest: &[u8]) -> [u32; 8] {
    let length = u32::try_from(rest.len()).expect("a name has at most 255 bytes");
    let padding = length | (length << 8);
    let padding = padding | (padding << 16);
    let mut words = [padding; 8];
    for (word, bytes) in words.iter_mut().zip(rest.chunks(4)) {
        *word = bytes.iter().fold(padding, |value, byte| u32::from(*byte).wrapping_add(value << 8));
    }
    words
}

fn transform(state: &mut [u32; 4], input: &[u32; 8]) {
    const ROUND_2: u32 = 0x5a82_7999;
    const ROUND_3: u32 = 0x6ed9_eba1;
    let choose = |x: u32, y: u32, z: u32| z ^ (x & (y ^ z));
    let majority = |x: u32, y: u32, z: u32| (x & y).wrapping_add((x ^ y) & z);
    let parity = |x: u32, y: u32, z: u32| x ^ y ^ z;

    let [i0, i1, i2, i3, i4, i5, i6, i7] = *input;
    let [mut a, mut b, mut c, mut d] = *state;
    let mut step = |mix: &dyn Fn(u32, u32, u32) -> u32, word: u32, turn: u32| {
        let mixed = a.wrapping_add(mix(b, c, d)).wrapping_add(word).rotate_left(turn);
        (a, b, c, d) = (d, mixed, b, c);
    };
    for (word, turn) in [(i0, 3), (i1, 7), (i2, 11), (i3, 19), (i4, 3), (i5, 7), (i6, 11), (i7, 19)] {
        step(&choose, word, turn);
    }
    for (word, turn) in [(i1, 3), (i3, 5), (i5, 9), (i7, 13), (i0, 3), (i2, 5), (i4, 9), (i6, 13)] {
        step(&majority, word.wrapping_add(ROUND_2), turn);
    }
    for (word, turn) in [(i3, 3), (i7, 9), (i2, 11), (i6, 15), (i1, 3), (i5, 9), (i0, 11), (i4, 15)] {
        step(&parity, word.wrapping_add(ROUND_3), turn);
    }
    for (word, add) in state.iter_mut().zip([a, b, c, d]) {
        *word = word.wrapping_add(add);
    }
}
