//! Sizes of memory and disks, with the bounds that a guest needs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// Memory of a guest: whole MiB, 96 MiB to 1 TiB. A general kernel and its initramfs do not start in less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Memory(u64);

/// Size of a disk: whole MiB, 16 MiB to 16 TiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct DiskSize(u64);

#[derive(Debug, thiserror::Error)]
pub enum NotASize {
    #[error("{text:?} is not a size: write a number and K, M, G or T, as in 512M")]
    Text { text: String },
    #[error(
        "{what} must be {least} MiB to {most} MiB, written as a number with k, m, g or t behind it, as in 512m"
    )]
    Unreadable { what: &'static str, least: u64, most: u64 },
    #[error("{what} of {bytes} bytes: possible is {least} MiB to {most} MiB")]
    OutOfBounds { what: &'static str, bytes: u64, least: u64, most: u64 },
}

/// Bytes of a size as people write it: a number, also a part like 1.5, then nothing (bytes) or k, m, g, t in powers of 1024,
/// then optionally "b" or "ib".
pub fn bytes(text: &str) -> Result<u64, NotASize> {
    parse(text).ok_or_else(|| NotASize::Text { text: text.to_owned() })
}

fn parse(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let end = lower.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(lower.len());
    let (number, unit) = lower.split_at_checked(end)?;
    let shift = match unit {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let scale = 1_u128 << shift;
    // In thousandths: nobody means a byte by a fraction.
    let thousandths = match fraction {
        "" => 0,
        digits if digits.len() <= 3 => digits.parse::<u128>().ok()? * 10_u128.pow(3 - digits.len() as u32),
        _ => return None,
    };
    let whole = u128::from(whole.parse::<u64>().ok()?);
    u64::try_from(whole * scale + thousandths * scale / 1000).ok()
}

/// Rounds up to whole MiB and checks the bounds, which are in MiB.
fn bounded(what: &'static str, bytes: u64, least: u64, most: u64) -> Result<u64, NotASize> {
    let mib = bytes.div_ceil(MIB);
    if (least..=most).contains(&mib) {
        Ok(mib * MIB)
    } else {
        Err(NotASize::OutOfBounds { what, bytes, least, most })
    }
}

macro_rules! size {
    ($($name:ident, $what:literal, $least:literal, $most:expr;)*) => {$(
        impl $name {
            /// Rounded up to whole MiB.
            pub fn from_bytes(bytes: u64) -> Result<Self, NotASize> {
                bounded($what, bytes, $least, $most).map(Self)
            }
            pub fn bytes(self) -> u64 {
                self.0
            }
            pub fn mib(self) -> u64 {
                self.0 / MIB
            }
        }
        impl FromStr for $name {
            type Err = NotASize;
            fn from_str(text: &str) -> Result<Self, NotASize> {
                let unreadable = NotASize::Unreadable { what: $what, least: $least, most: $most };
                Self::from_bytes(parse(text).ok_or(unreadable)?)
            }
        }
        impl TryFrom<u64> for $name {
            type Error = NotASize;
            fn try_from(bytes: u64) -> Result<Self, NotASize> {
                Self::from_bytes(bytes)
            }
        }
        impl From<$name> for u64 {
            fn from(size: $name) -> Self {
                size.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} MiB", self.mib())
            }
        }
    )*};
}
size! {
    Memory, "memory", 96, 1 << 20;
    DiskSize, "a disk", 16, 16 << 20;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, expected) in [
            ("0", 0),
            ("17", 17),
            ("17b", 17),
            ("1k", 1024),
            ("512m", 512 << 20),
            ("512MiB", 512 << 20),
            ("1.5G", 3 << 29),
            ("0.25t", 1 << 38),
        ] {
            assert_eq!(bytes(text).unwrap(), expected, "{text}");
        }
        for bad in ["", "m", "-1", "1x", "1.2345g", "1.g.", "18446744073709551615t", "1 2", "1 g b"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_and_disks_have_whole_mebibytes_within_bounds() {
        for (text, mib) in [("512M", 512), ("1GiB", 1024), ("134217728", 128), ("98305k", 97), ("0.1g", 103)]
        {
            assert_eq!(text.parse::<Memory>().unwrap().mib(), mib, "{text}");
        }
        for bad in ["1m", "95m", "2t"] {
            assert!(bad.parse::<Memory>().is_err(), "{bad}");
        }
        for unreadable in ["-1", "-1g", "much", ""] {
            let said = unreadable.parse::<Memory>().unwrap_err().to_string();
            assert!(said.starts_with("memory must be 96 MiB to"), "{unreadable:?}: {said}");
        }
        assert_eq!("2t".parse::<DiskSize>().unwrap().mib(), 2 << 20);
    }
}
