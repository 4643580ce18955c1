//! Names that users give to templates and to pools. They are names of files, too.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Of a template: 1 to 63 of [a-zA-Z0-9_.-], starting with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName(String);

/// Of a pool: as of a template, but 40 at the most. Its VMs are named after it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PoolName(String);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{text:?} is not a name: use 1 to {longest} of a-z, A-Z, 0-9, '_', '.' and '-', starting with a letter or digit"
)]
pub struct NotAName {
    text: String,
    longest: usize,
}

/// Most of a wrong name that is repeated.
const SHOWN: usize = 100;

fn check(text: &str, longest: usize) -> Result<String, NotAName> {
    let good = (1..=longest).contains(&text.len())
        && text.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    if good {
        Ok(text.to_owned())
    } else {
        Err(NotAName { text: text.chars().take(SHOWN).collect(), longest })
    }
}

macro_rules! names {
    ($($name:ident: $longest:literal),*) => {$(
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $name {
            type Err = NotAName;
            fn from_str(text: &str) -> Result<Self, NotAName> {
                check(text, $longest).map(Self)
            }
        }
        impl TryFrom<String> for $name {
            type Error = NotAName;
            fn try_from(text: String) -> Result<Self, NotAName> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}
names!(TemplateName: 63, PoolName: 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_no_other_directory() {
        for bad in ["", ".", "..", ".hidden", "a/b", "-x", "a b", "ä"] {
            assert!(bad.parse::<TemplateName>().is_err() && bad.parse::<PoolName>().is_err(), "{bad}");
        }
        assert_eq!("py-3.12_x".parse::<TemplateName>().unwrap().as_str(), "py-3.12_x");
        let long = "x".repeat(63);
        assert!(long.parse::<TemplateName>().is_ok() && long.parse::<PoolName>().is_err());
    }
}
