//! Names within the directory of a snapshot.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::{Error, write_error};
use super::manifest::Part;

pub(super) fn manifest(directory: &Path) -> PathBuf {
    directory.join("manifest.json")
}

pub(super) fn part(directory: &Path, part: Part) -> PathBuf {
    directory.join(part.name())
}

/// The digests of a part's chunks.
pub(super) fn index(directory: &Path, part: Part) -> PathBuf {
    directory.join(format!("{part}.chunks"))
}

/// Removes a directory with all that is in it; it is no error if there is none.
pub(super) fn remove_directory(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(write_error(path, source)),
        _ => Ok(()),
    }
}
