//! Every path of a husk.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::protocol::Id;

/// Directories that a workdir may have from Imp's data directory.
const SHARED: [&str; 2] = ["images", "kernels"];

/// Where a husk keeps its things. One husk at a time works in a workdir.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The record of the machine, its disk and its logs.
    pub(crate) workdir: PathBuf,
    /// Sockets of the machine.
    pub(crate) runtime: PathBuf,
    /// Where snapshots for forks are to be found: a link for each.
    pub(crate) forks: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot make the directory {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} belongs to another user", path.display())]
    Foreign { path: PathBuf },
    #[error("{} has {name} of its own, so it cannot use those of {}: leave --data-dir out, or choose another --workdir", workdir.display(), data.display())]
    OwnThings { workdir: PathBuf, name: &'static str, data: PathBuf },
    #[error("{} has no {name}: --data-dir must be a data directory of Imp's, in which templates have been built", data.display())]
    NothingThere { data: PathBuf, name: &'static str },
    #[error("cannot make {} a link to {}", link.display(), target.display())]
    Link {
        link: PathBuf,
        target: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Layout {
    /// Makes the directories, which nobody else may enter.
    pub(crate) fn make(&self) -> Result<(), Error> {
        for path in [&self.workdir, &self.runtime, &self.forks, &self.fork_records()] {
            make_private(path)?;
        }
        Ok(())
    }

    /// Has the workdir use the images, templates and kernels of a data directory of Imp's.
    pub(crate) fn share(&self, data: &Path) -> Result<(), Error> {
        for name in SHARED {
            let (link, target) = (self.workdir.join(name), data.join(name));
            if !target.is_dir() {
                return Err(Error::NothingThere { data: data.to_owned(), name });
            }
            match fs::read_link(&link) {
                Ok(there) if there == target => continue,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => {
                    let (workdir, data) = (self.workdir.clone(), data.to_owned());
                    return Err(Error::OwnThings { workdir, name, data });
                }
            }
            let failed = |source| Error::Link { link: link.clone(), target: target.clone(), source };
            let new = self.workdir.join(format!("{name}.new"));
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
            symlink(&target, &new).and_then(|()| fs::rename(&new, &link)).map_err(failed)?;
        }
        Ok(())
    }

    /// Which snapshots for forks there may be, from before they are made until nothing of them is left.
    pub(crate) fn fork_records(&self) -> PathBuf {
        self.workdir.join("fork-records")
    }

    pub(crate) fn fork_record(&self, fork: &Id) -> PathBuf {
        self.fork_records().join(fork.as_str())
    }

    /// Where a fork's snapshot is to be found when nobody says otherwise.
    pub(crate) fn fork(&self, fork: &Id) -> PathBuf {
        self.forks.join(fork.as_str())
    }
}

fn make_private(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Make { path: path.to_owned(), source };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    let metadata = fs::metadata(path).map_err(failed)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::Foreign { path: path.to_owned() });
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(folder: &Path) -> Layout {
        let workdir = folder.join("husk");
        Layout { runtime: workdir.join("run"), forks: workdir.join("forks"), workdir }
    }

    #[test]
    fn a_workdir_is_closed_to_others_and_uses_what_another_one_has() {
        let folder = tempfile::tempdir().unwrap();
        let layout = layout(folder.path());
        fs::create_dir(&layout.workdir).unwrap();
        fs::set_permissions(&layout.workdir, fs::Permissions::from_mode(0o755)).unwrap();
        layout.make().unwrap();
        for path in [&layout.workdir, &layout.forks, &layout.fork_records()] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700);
        }
        for data in ["one", "one", "two"].map(|name| folder.path().join(name)) {
            if !data.exists() {
                assert!(matches!(layout.share(&data), Err(Error::NothingThere { .. })));
                for name in SHARED {
                    fs::create_dir_all(data.join(name)).unwrap();
                }
            }
            layout.share(&data).unwrap();
            assert_eq!(fs::read_link(layout.workdir.join("images")).unwrap(), data.join("images"));
        }
        fs::remove_file(layout.workdir.join("kernels")).unwrap();
        fs::create_dir(layout.workdir.join("kernels")).unwrap();
        let error = layout.share(&folder.path().join("one")).unwrap_err();
        assert!(error.to_string().contains("has kernels of its own"), "{error}");
    }
}
