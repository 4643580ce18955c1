//! For which machine an image was built, in the words of the OCI specification.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Operating system, processor architecture and its variant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a platform: expected OS/ARCHITECTURE[/VARIANT], such as linux/amd64")]
pub struct ParseError(String);

impl Platform {
    /// Linux on the architecture of this machine.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", Some("v8")),
            "powerpc64" => ("ppc64le", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: variant.map(str::to_owned) }
    }

    /// The same platform with its usual spelling, so that equal machines compare equal.
    pub fn normal(mut self) -> Self {
        self.os = self.os.to_ascii_lowercase();
        self.architecture = match self.architecture.to_ascii_lowercase().as_str() {
            "x86_64" | "x86-64" => "amd64".into(),
            "aarch64" => "arm64".into(),
            other => other.into(),
        };
        let usual = match self.architecture.as_str() {
            "arm64" => Some("v8"),
            "arm" => Some("v7"),
            _ => None,
        };
        self.variant = self.variant.filter(|variant| !variant.is_empty()).or(usual.map(str::to_owned));
        self
    }

    /// How well an image of the platform `offered` runs on this one: the higher the better, None if it does not. Both are normal.
    pub fn fitness(&self, offered: &Self) -> Option<u8> {
        if (&self.os, &self.architecture) != (&offered.os, &offered.architecture) {
            return None;
        }
        match (level(self.variant.as_deref()), level(offered.variant.as_deref())) {
            (_, None) if self.architecture == "amd64" => Some(1),
            (None, Some(level)) if self.architecture == "amd64" => (level <= 1).then_some(1),
            (Some(ours), Some(theirs)) => (theirs <= ours).then_some(theirs),
            _ => (self.variant == offered.variant).then_some(0),
        }
    }
}

/// The number in `v8`.
fn level(variant: Option<&str>) -> Option<u8> {
    variant?.strip_prefix('v')?.parse().ok()
}

impl FromStr for Platform {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parts: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match parts.as_slice() {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant)),
            _ => return Err(ParseError(text.to_owned())),
        };
        let words = [Some(os), Some(architecture), variant];
        if words.iter().flatten().any(|word| word.is_empty() || !word.bytes().all(is_word)) {
            return Err(ParseError(text.to_owned()));
        }
        let variant = variant.map(|variant| (*variant).to_owned());
        Ok(Self { os: (*os).to_owned(), architecture: (*architecture).to_owned(), variant }.normal())
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_variant_runs_on_a_newer_machine_and_not_the_other_way() {
        for (machine, offered, fitness) in [
            ("linux/amd64", "linux/amd64", Some(1)),
            ("linux/amd64", "linux/x86_64", Some(1)),
            ("linux/amd64", "linux/amd64/v3", None),
            ("linux/amd64/v3", "linux/amd64/v2", Some(2)),
            ("linux/amd64/v3", "linux/amd64", Some(1)),
            ("linux/amd64", "linux/arm64", None),
            ("linux/amd64", "windows/amd64", None),
            ("linux/arm64", "linux/aarch64", Some(8)),
            ("linux/arm64", "linux/arm64/v8", Some(8)),
            ("linux/arm64", "linux/arm64/v9", None),
            ("linux/arm/v6", "linux/arm/v7", None),
            ("linux/arm/v7", "linux/arm/v6", Some(6)),
            ("linux/riscv64", "linux/riscv64", Some(0)),
        ] {
            let parse = |text: &str| text.parse::<Platform>().unwrap();
            assert_eq!(parse(machine).fitness(&parse(offered)), fitness, "{offered} on {machine}");
        }
    }

    #[test]
    fn text_that_is_no_platform_is_refused() {
        for text in ["", "linux", "linux/", "/amd64", "linux/amd64/v1/x", "li nux/amd64", "linux/../x"] {
            assert_eq!(text.parse::<Platform>(), Err(ParseError(text.into())));
        }
    }
}
