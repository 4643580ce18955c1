//! The generated identity of a VM, under which everything that belongs to it is kept.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Sixteen lower-case hex digits, random.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmId(String);

#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a VM id (16 lower-case hex digits)")]
pub struct NotAVmId {
    text: String,
}

impl VmId {
    pub const LENGTH: usize = 16;

    /// A new id from eight random bytes.
    pub fn from_random(bytes: [u8; 8]) -> Self {
        Self(hex::encode(bytes))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first twelve digits, for tables.
    pub fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

impl FromStr for VmId {
    type Err = NotAVmId;

    fn from_str(text: &str) -> Result<Self, NotAVmId> {
        let good = text.len() == Self::LENGTH
            && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if good { Ok(Self(text.to_owned())) } else { Err(NotAVmId { text: text.to_owned() }) }
    }
}

impl TryFrom<String> for VmId {
    type Error = NotAVmId;

    fn try_from(text: String) -> Result<Self, NotAVmId> {
        text.parse()
    }
}

impl From<VmId> for String {
    fn from(id: VmId) -> Self {
        id.0
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sixteen_lower_case_hex_digits_are_an_id() {
        assert_eq!(
            "00ff00ff00ff00ff".parse::<VmId>().unwrap(),
            VmId::from_random([0, 255, 0, 255, 0, 255, 0, 255])
        );
        for bad in
            ["", "00ff", "00FF00FF00FF00FF", "../../../../etc/x", "00ff00ff00ff00fg", "00ff00ff00ff00ff0"]
        {
            assert!(bad.parse::<VmId>().is_err(), "{bad}");
        }
    }
}
