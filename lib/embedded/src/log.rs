//! The owner's own log: one file, and the one before it, each of a bounded size.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

/// Size at which a file is set aside.
const BOUND: u64 = 1 << 20;

pub(crate) struct BoundedLog {
    path: PathBuf,
    open: Mutex<Open>,
}

struct Open {
    file: File,
    size: u64,
}

impl BoundedLog {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), open: Mutex::new(Open::append(path)?) })
    }
}

impl Open {
    fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

/// One message: written whole.
pub(crate) struct Entry<'a>(&'a BoundedLog);

impl Write for Entry<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.size > 0 && open.size + bytes.len() as u64 > BOUND {
            match std::fs::rename(&self.0.path, self.0.path.with_extension("log.1")) {
                // Set aside before, when the next one could not be made.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
            *open = Open::append(&self.0.path)?;
        }
        open.file.write_all(bytes)?;
        open.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for BoundedLog {
    type Writer = Entry<'a>;

    fn make_writer(&'a self) -> Entry<'a> {
        Entry(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_messages_takes_two_files_of_bounded_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("owner.log");
        let log = BoundedLog::open(&path).unwrap();
        for _ in 0..5 {
            for _ in 0..BOUND / 1024 {
                log.make_writer().write_all(&[b'x'; 1024]).unwrap();
            }
        }
        let sizes: Vec<u64> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .collect();
        assert!(sizes.len() == 2 && sizes.iter().all(|size| (1..=BOUND).contains(size)), "{sizes:?}");
    }
}
