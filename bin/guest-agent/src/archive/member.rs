//! Names of an archive's members, checked.

use crate::files::Error;

/// A name below the archive's directory: no empty, '.' or '..' parts, not absolute. Empty for the directory itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemberName(Vec<u8>);

/// What the kernel takes for a path.
const LONGEST: usize = 4095;

impl MemberName {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let shown = || String::from_utf8_lossy(bytes).chars().take(128).collect::<String>();
        if bytes.contains(&0) {
            return Err(Error::Member(shown(), "its name has a zero byte"));
        }
        let mut name = Vec::with_capacity(bytes.len());
        for part in bytes.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
            if part == b".." {
                return Err(Error::Leaves(shown()));
            }
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend_from_slice(part);
        }
        if name.len() > LONGEST {
            Err(Error::Member(shown(), "its name is too long"))
        } else {
            Ok(Self(name))
        }
    }

    /// Directory and last part; none for the directory itself.
    pub(super) fn split(&self) -> Option<(&[u8], &[u8])> {
        if self.0.is_empty() {
            return None;
        }
        match self.0.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => Some((self.0.get(..slash)?, self.0.get(slash + 1..)?)),
            None => Some((&[], &self.0)),
        }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_relative_and_plain() {
        let name =
            |text: &str| MemberName::parse(text.as_bytes()).map(|name| String::from_utf8(name.0).unwrap());
        assert_eq!(name("./a//b/./c/").unwrap(), "a/b/c");
        assert_eq!(name("/etc/passwd").unwrap(), "etc/passwd");
        assert_eq!(name("./").unwrap(), "");
        assert_eq!(name("..a/b..").unwrap(), "..a/b..");
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for text in ["..", "a/../b", "/..", "a/.."] {
            assert!(matches!(MemberName::parse(text.as_bytes()), Err(Error::Leaves(_))), "{text}");
        }
        assert!(matches!(MemberName::parse(b"a\0b"), Err(Error::Member(..))));
        assert!(matches!(MemberName::parse(&[b'a'; 5000]), Err(Error::Member(..))));
    }
}
