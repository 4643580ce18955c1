//! Things made once: a folder that appears whole under the digest of its recipe, made by one process while others wait.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use sha2::{Digest as _, Sha256};

use crate::machine;

/// The folder that `make` fills, from the cache when a folder of the same recipe is there.
pub(super) fn layout(
    name: &str,
    recipe: &[&[u8]],
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    folder(&machine::cache()?.join("fixtures"), name, recipe, make)
}

fn folder(
    cache: &Path,
    name: &str,
    recipe: &[&[u8]],
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let folder = cache.join(format!("{name}-{}", digest(recipe)));
    if folder.is_dir() {
        return Ok(folder);
    }
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().context("waiting for another process to make the same")?;
    if folder.is_dir() {
        return Ok(folder);
    }
    let new = tempfile::Builder::new().prefix(".new-").tempdir_in(cache)?;
    make(new.path()).with_context(|| format!("making the fixture {name}"))?;
    fs::rename(new.path(), &folder)?;
    // It has its name now: there is nothing left to remove.
    let _ = new.keep();
    Ok(folder)
}

fn digest(recipe: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in recipe {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut digest = hex::encode(hash.finalize());
    digest.truncate(20);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_could_not_be_made_is_not_there() {
        let cache = tempfile::tempdir().unwrap();
        let failing = |folder: &Path| {
            fs::write(folder.join("half"), b"")?;
            anyhow::bail!("no")
        };
        assert!(folder(cache.path(), "x", &[b"1"], failing).is_err());
        let made =
            folder(cache.path(), "x", &[b"1"], |folder| Ok(fs::write(folder.join("all"), b"")?)).unwrap();
        let names: Vec<_> = fs::read_dir(made).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["all"]);
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 2, "the folder and its lock");
    }

    #[test]
    fn another_recipe_is_another_folder() {
        let cache = tempfile::tempdir().unwrap();
        let make = |recipe: &[&[u8]]| folder(cache.path(), "x", recipe, |_| Ok(())).unwrap();
        assert_ne!(make(&[b"ab", b"c"]), make(&[b"a", b"bc"]));
        assert_eq!(make(&[b"ab", b"c"]), make(&[b"ab", b"c"]));
    }
}
