//! The number of this machine's generation, for generators in user space: they compare it before they draw.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(super) const DIRECTORY: &str = "/run/imp";
const LONGEST: usize = 128;

#[derive(Debug, thiserror::Error)]
#[error("{} cannot be replaced", path.display())]
pub(super) struct Error {
    path: PathBuf,
    source: io::Error,
}

#[derive(Debug, thiserror::Error)]
#[error("`generation` must be one word of 1 to {LONGEST} printable characters")]
pub(super) struct ParseError;

/// One word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Generation(String);

impl Generation {
    pub(super) fn parse(text: String) -> Result<Self, ParseError> {
        let good = (1..=LONGEST).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        if good { Ok(Self(text)) } else { Err(ParseError) }
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Replaces `directory`/generation: a reader sees the old number or the new one.
pub(super) fn repair(directory: &Path, generation: &Generation) -> Result<(), Error> {
    let path = directory.join("generation");
    let replaced = (|| {
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        let temporary = directory.join(".generation");
        let _ = fs::remove_file(&temporary);
        let mut file = File::options().write(true).create_new(true).mode(0o644).open(&temporary)?;
        // Whatever the mask is.
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        file.write_all(format!("{}\n", generation.0).as_bytes())?;
        fs::rename(&temporary, &path)
    })();
    replaced.map_err(|source| Error { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_replaces_the_one_before_for_all_to_read() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("run/imp");
        for text in ["first-1", "second-2"] {
            repair(&below, &Generation::parse(text.into()).unwrap()).unwrap();
            let path = below.join("generation");
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{text}\n"));
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o644);
        }
        assert_eq!(fs::read_dir(below).unwrap().count(), 1);
    }

    #[test]
    fn a_generation_is_one_line_and_one_word() {
        for text in ["", "a b", "a\nb", "ä", &"x".repeat(129)] {
            assert!(Generation::parse(text.into()).is_err(), "{text:?}");
        }
    }
}
