//! A file that appears complete under its name or not at all.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Every unfinished file is called so, and locked by who writes it.
const PREFIX: &str = ".imp-partial-";

/// An unfinished file beside its target. Dropped, it is removed; killed, it is left for [`remove_leftovers`].
#[derive(Debug)]
pub(crate) struct Partial {
    file: NamedTempFile,
    target: PathBuf,
}

impl Partial {
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        loop {
            let file = tempfile::Builder::new().prefix(PREFIX).tempfile_in(directory(target))?;
            file.as_file().lock()?;
            // Whoever cleans up may have come between creation and lock.
            if file.as_file().metadata()?.nlink() > 0 {
                return Ok(Self { file, target: target.to_owned() });
            }
        }
    }

    pub(crate) fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Makes the content durable, then gives it its name, in place of what had it.
    pub(crate) fn commit(self) -> io::Result<()> {
        self.file.as_file().sync_data()?;
        self.rename()
    }

    /// The same without waiting for the disk: for files that a crash of the machine may take.
    pub(crate) fn commit_unsynced(self) -> io::Result<()> {
        self.file.persist(&self.target)?;
        Ok(())
    }

    fn rename(self) -> io::Result<()> {
        self.file.persist(&self.target)?;
        File::open(directory(&self.target))?.sync_all()
    }
}

fn directory(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Removes what killed processes left unfinished in `directory`; what a living one writes stays. Says how many went.
pub fn remove_leftovers(directory: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())
            || !entry.file_type()?.is_file()
        {
            continue;
        }
        let file = match File::open(entry.path()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(error)) => return Err(error),
        }
        match std::fs::remove_file(entry.path()) {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_the_dead_go_and_files_of_the_living_stay() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(".imp-partial-dead"), b"x").unwrap();
        std::fs::write(directory.path().join("image"), b"x").unwrap();
        let living = Partial::create(&directory.path().join("target")).unwrap();
        assert_eq!(remove_leftovers(directory.path()).unwrap(), 1);
        living.commit().unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["image", "target"]);
    }
}
