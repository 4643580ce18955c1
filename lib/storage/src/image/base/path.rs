//! The name of a tar entry, taken apart: what it names below the root, and whether it is a whiteout.

use super::Refusal;
use crate::ext4::MOST_NAME_BYTES;

/// Components from the root down; empty for the root itself.
pub(super) fn components(path: &[u8]) -> Result<Vec<&[u8]>, Refusal> {
    let mut components = Vec::new();
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => {
                components.pop().ok_or(Refusal::AboveRoot)?;
            }
            name if name.contains(&0) => return Err(Refusal::Name),
            name if name.len() > MOST_NAME_BYTES => return Err(Refusal::NameTooLong(name.len())),
            name => components.push(name),
        }
    }
    Ok(components)
}

/// What the last component of a name asks for (OCI image specification, layer.md, "Whiteouts").
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wish<'a> {
    /// The name is one of the image.
    Place,
    /// This name of lower layers is hidden.
    Hide(&'a [u8]),
    /// All that lower layers have in the directory is hidden.
    HideAll,
    /// Bookkeeping of a tool.
    Nothing,
}

pub(super) fn wish(name: &[u8]) -> Result<Wish<'_>, Refusal> {
    match name.strip_prefix(b".wh.") {
        None => Ok(Wish::Place),
        Some(b".wh..opq") => Ok(Wish::HideAll),
        Some(b"" | b"." | b"..") => Err(Refusal::Name),
        Some(rest) if rest.starts_with(b".wh.") => Ok(Wish::Nothing),
        Some(hidden) => Ok(Wish::Hide(hidden)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_relative_to_the_root_however_they_are_written() {
        let a_b = vec![b"a".as_slice(), b"b"];
        for path in [b"a/b".as_slice(), b"/a/b", b"./a//b/", b"a/x/../b"] {
            assert_eq!(components(path).unwrap(), a_b);
        }
        assert_eq!(components(b"./").unwrap(), Vec::<&[u8]>::new());
        assert_eq!(components(b"a/../../b"), Err(Refusal::AboveRoot));
    }

    #[test]
    fn whiteouts_are_told_from_names() {
        assert_eq!(wish(b".wh.a"), Ok(Wish::Hide(b"a")));
        assert_eq!(wish(b".wh..wh..opq"), Ok(Wish::HideAll));
        assert_eq!(wish(b".wh..wh.plnk"), Ok(Wish::Nothing));
        assert_eq!(wish(b".whale"), Ok(Wish::Place));
        assert_eq!(wish(b".wh..."), Err(Refusal::Name));
        assert_eq!(wish(b".wh."), Err(Refusal::Name));
    }
}
