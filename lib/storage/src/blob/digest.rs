//! SHA-256 content addresses: the only names that blobs, images and disks have.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest; its text is `sha256:` and 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("digest algorithm {0:?} is not supported: only sha256 is")]
    Algorithm(String),
    #[error("{0:?} is not a digest: expected sha256: and 64 lower-case hex digits")]
    Form(String),
}

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 hex digits alone: the name of the file that holds the content.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Parses the 64 hex digits alone.
    pub fn from_hex(text: &str) -> Result<Self, Error> {
        let wrong = || Error::Form(shorten(text));
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| wrong())?;
        Ok(Self(bytes))
    }

    /// The first 12 hex digits: what people read and type.
    pub fn short(&self) -> String {
        let mut text = self.hex();
        text.truncate(12);
        text
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            Some(("sha256", hex)) => Self::from_hex(hex),
            Some((algorithm @ ("sha384" | "sha512" | "blake3"), _)) => {
                Err(Error::Algorithm(algorithm.to_owned()))
            }
            _ => Err(Error::Form(shorten(text))),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What is hashed while it passes by.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// Hostile text is not repeated at full length.
fn shorten(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn other_algorithms_are_named_in_the_refusal() {
        assert_eq!("sha512:00".parse::<Digest>(), Err(Error::Algorithm("sha512".into())));
    }

    #[test]
    fn only_64_lower_case_hex_digits_are_a_digest() {
        let good = Digest::of(b"x").to_string();
        assert!(good.parse::<Digest>().is_ok());
        for bad in
            ["", "sha256:", "sha256:12", &good.to_uppercase(), &good.replace("sha256", "SHA256"), &good[..70]]
        {
            assert!(matches!(bad.parse::<Digest>(), Err(Error::Form(_))), "{bad}");
        }
        assert!(good.replace("sha256:", "sha256:A").parse::<Digest>().is_err());
        assert!(format!("{good}0").parse::<Digest>().is_err());
        assert!(format!("{}/", &good[..70]).parse::<Digest>().is_err());
    }

    proptest! {
        #[test]
        fn text_and_back_is_the_same_digest(bytes: [u8; 32]) {
            let digest = Digest::from_bytes(bytes);
            prop_assert_eq!(digest.to_string().parse(), Ok(digest));
            prop_assert_eq!(Digest::from_hex(&digest.hex()), Ok(digest));
        }

        #[test]
        fn no_text_makes_the_parser_fail_otherwise(text in ".*") {
            if let Ok(digest) = text.parse::<Digest>() {
                prop_assert_eq!(digest.to_string(), text);
            }
        }
    }
}
