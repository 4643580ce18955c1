//! Small records of the owner's: a JSON file each, in a directory for each kind. After a crash at any moment a record is there
//! whole, as it was or as it is to be.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::marker::PhantomData;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// What the file of a record ends with.
const ENDING: &str = "json";
/// Of one that is not there yet.
const NEW: &str = "new";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot remove {path}")]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The records of one kind. One process writes them: the owner, which has a lock.
#[derive(Debug)]
pub(crate) struct Records<T> {
    directory: PathBuf,
    kind: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Records<T> {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory, kind: PhantomData }
    }

    /// `name`: what may be a file's.
    pub(crate) fn write(&self, name: &str, record: &T) -> Result<(), Error> {
        let path = self.path(name);
        let new = path.with_extension(NEW);
        let written = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(record)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            sync(&self.directory)
        };
        written().map_err(|source| Error::Write { path: path.clone(), source })
    }

    /// None also of one that is damaged: it says nothing.
    pub(crate) fn read(&self, name: &str) -> Result<Option<T>, Error> {
        read(&self.path(name))
    }

    pub(crate) fn all(&self) -> Result<Vec<T>, Error> {
        let failed = |source| Error::Read { path: self.directory.clone(), source };
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed(source)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|ending| ending == ENDING) {
                found.extend(read(&path)?);
            }
        }
        Ok(found)
    }

    /// One that is not there is no error.
    pub(crate) fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Ok(()) => sync(&self.directory).map_err(|source| Error::Remove { path, source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(Error::Remove { path, source }),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        // Not `with_extension`: names have dots.
        self.directory.join(format!("{name}.{ENDING}"))
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)
            .inspect_err(
                |error| tracing::warn!(path = %path.display(), %error, "a damaged record is ignored"),
            )
            .ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again_and_what_is_removed_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::<u32>::new(folder.path().join("kind"));
        assert!(records.all().unwrap().is_empty());
        records.write("a.b", &1).unwrap();
        records.write("a.c", &2).unwrap();
        records.write("a.b", &3).unwrap();
        let mut all = records.all().unwrap();
        all.sort_unstable();
        assert_eq!((all, records.read("a.b").unwrap()), (vec![2, 3], Some(3)));
        records.remove("a.b").unwrap();
        records.remove("a.b").unwrap();
        assert_eq!((records.all().unwrap(), records.read("a.b").unwrap()), (vec![2], None));
    }

    #[test]
    fn what_a_crash_left_is_no_record() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::<u32>::new(folder.path().to_owned());
        records.write("a", &1).unwrap();
        fs::write(folder.path().join("b.new"), "2").unwrap();
        fs::write(folder.path().join("c.json"), "").unwrap();
        assert_eq!(records.all().unwrap(), [1]);
    }
}
