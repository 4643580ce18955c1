//! Domain names, and patterns of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A domain name in lower case and without the last dot: letters, digits, `-` and `_`, in labels of at most 63 bytes.
/// Names in other scripts are written in their ASCII form (`xn--…`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainName(String);

/// A name, or `*.` and a name: everything below that name, at any depth, but not the name itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NamePattern {
    Exactly(DomainName),
    Below(DomainName),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is neither a domain name nor *. and a domain name (names in other scripts: write their xn-- form)"
)]
pub struct PatternError {
    text: String,
}

impl DomainName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl NamePattern {
    pub fn matches(&self, name: &DomainName) -> bool {
        match self {
            Self::Exactly(exactly) => exactly == name,
            Self::Below(parent) => {
                name.0.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
        }
    }
}

impl FromStr for DomainName {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let good_label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        if name.len() <= 253 && name.split('.').all(good_label) {
            Ok(Self(name))
        } else {
            Err(PatternError { text: text.to_owned() })
        }
    }
}

impl FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        match text.strip_prefix("*.") {
            Some(parent) => {
                Ok(Self::Below(parent.parse().map_err(|_| PatternError { text: text.to_owned() })?))
            }
            None => Ok(Self::Exactly(text.parse()?)),
        }
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(name) => write!(f, "{name}"),
            Self::Below(parent) => write!(f, "*.{parent}"),
        }
    }
}

impl TryFrom<String> for DomainName {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl TryFrom<String> for NamePattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl From<DomainName> for String {
    fn from(name: DomainName) -> Self {
        name.0
    }
}

impl From<NamePattern> for String {
    fn from(pattern: NamePattern) -> Self {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_whole_labels() {
        for (pattern, name, matches) in [
            ("example.com", "example.com", true),
            ("Example.COM.", "eXample.com", true),
            ("example.com", "www.example.com", false),
            ("*.example.com", "www.example.com", true),
            ("*.example.com", "a.b.example.com", true),
            ("*.example.com", "example.com", false),
            ("*.example.com", "notexample.com", false),
            ("*.example.com", "wwwexample.com", false),
            ("*.com", "example.com", true),
        ] {
            let (p, n): (NamePattern, DomainName) = (pattern.parse().unwrap(), name.parse().unwrap());
            assert_eq!(p.matches(&n), matches, "{pattern} {name}");
        }
    }

    #[test]
    fn what_is_no_name_is_no_pattern() {
        for bad in [
            "",
            ".",
            "*",
            "*.",
            "*.*.com",
            "a..b",
            "a b",
            "ex*mple.com",
            "a/b",
            "bücher.example",
            &"a".repeat(64),
        ] {
            assert!(bad.parse::<NamePattern>().is_err(), "{bad:?}");
        }
    }
}
