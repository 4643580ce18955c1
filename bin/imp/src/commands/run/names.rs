//! Names for VMs that are given none: easy to say, hard to mix up.

use anyhow::Context as _;

const QUALITIES: [&str; 32] = [
    "amber", "bold", "brave", "brisk", "calm", "clever", "crisp", "deft", "eager", "fair", "fleet", "gentle",
    "glad", "happy", "jolly", "keen", "kind", "lively", "lucky", "mellow", "merry", "neat", "nimble",
    "plucky", "proud", "quick", "quiet", "sharp", "sunny", "swift", "vivid", "witty",
];
const CREATURES: [&str; 32] = [
    "badger", "beetle", "bison", "crane", "cricket", "dingo", "falcon", "ferret", "finch", "gecko", "gopher",
    "heron", "ibis", "jackal", "koala", "lemur", "lynx", "marmot", "marten", "newt", "otter", "owl", "panda",
    "puffin", "quail", "raven", "robin", "seal", "stoat", "tapir", "wombat", "wren",
];

/// A name that nobody has.
pub(crate) fn made_up() -> anyhow::Result<String> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .context("the kernel has no random bytes")?;
    Ok(name(random))
}

/// A name from random bytes: one of sixteen billion.
fn name(random: [u8; 8]) -> String {
    let [quality, creature, rest @ ..] = random;
    let pick =
        |words: &[&'static str; 32], byte: u8| words.get(usize::from(byte % 32)).copied().unwrap_or("imp");
    let suffix = rest.iter().take(3).fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    format!("{}-{}-{suffix}", pick(&QUALITIES, quality), pick(&CREATURES, creature))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_made_up_name_is_a_name() {
        for byte in 0..=255 {
            let name = name([byte; 8]);
            assert!(name.parse::<imp_runtime::spec::VmName>().is_ok(), "{name}");
            assert!(name.parse::<imp_runtime::spec::HostName>().is_ok(), "{name}");
        }
    }

    #[test]
    fn different_bytes_make_different_names() {
        assert_ne!(name([1, 2, 3, 4, 5, 6, 7, 8]), name([1, 2, 3, 4, 6, 6, 7, 8]));
    }
}
