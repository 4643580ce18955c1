//! New regular files in the place of what has their name. A large one has no name until it is whole: who is killed while
//! he writes it leaves nothing, and what had the name has it till the moment in which the new file takes it. Only a kill
//! between the two steps that replace an old file leaves something: the new one, whole, as `.imp-` and sixteen digits.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;
use rustix::rand::{GetRandomFlags, getrandom};

/// What is smaller is written at once, and not worth the kernel's list of files without names.
const LARGE: u64 = 256 << 10;
const WRITE: OFlags = OFlags::WRONLY.union(OFlags::CLOEXEC);
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// What is left to be done when a new file is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a file that never gets its name is gone when it is closed"]
pub struct Naming {
    owed: bool,
}

/// An empty file that only its owner may read, to be written by him and then given to [`Naming::finish`]. A directory in
/// the way stays, and is an error.
pub fn create(directory: impl AsFd, name: impl Arg + Copy, size: u64) -> Result<(OwnedFd, Naming), Errno> {
    if size > LARGE
        && let Some(file) = unnamed(&directory)?
    {
        return Ok((file, Naming { owed: true }));
    }
    clear(&directory, name)?;
    let file = openat(directory, name, WRITE | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, MODE)?;
    Ok((file, Naming { owed: false }))
}

/// Makes room for a new name. A directory in the way stays, and is an error.
pub fn clear(directory: impl AsFd, name: impl Arg) -> Result<(), Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        cleared => cleared,
    }
}

/// None where the file system knows only files with names.
fn unnamed(directory: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    match openat(directory, c".", WRITE | OFlags::TMPFILE, MODE) {
        Ok(file) => Ok(Some(file)),
        // As open(2) has it: the file system, the kernel, or a file system in user space does not know the flag.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Naming {
    /// The file is whole: gives it its name in its directory, if it has none.
    pub fn finish(self, file: impl AsFd, directory: impl AsFd, name: impl Arg + Copy) -> Result<(), Errno> {
        if !self.owed {
            return Ok(());
        }
        match link(&file, &directory, name) {
            Err(Errno::EXIST) => {}
            linked => return linked,
        }
        // Only a rename puts one file in the place of another without a moment in which there is none.
        let passing = passing_name()?;
        link(file, &directory, passing.as_str())?;
        let renamed = renameat(&directory, passing.as_str(), &directory, name);
        if renamed.is_err() {
            // The first error says more.
            let _ = unlinkat(&directory, passing.as_str(), AtFlags::empty());
        }
        renamed
    }
}

/// By its descriptor alone a file could be linked only with CAP_DAC_READ_SEARCH.
fn link(file: impl AsFd, directory: impl AsFd, name: impl Arg) -> Result<(), Errno> {
    let open = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    linkat(CWD, open, directory, name, AtFlags::SYMLINK_FOLLOW)
}

fn passing_name() -> Result<String, Errno> {
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())?;
    Ok(format!(".imp-{:016x}", u64::from_ne_bytes(random)))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use super::*;

    #[test]
    fn a_large_file_is_seen_when_it_is_whole_and_replaces_what_had_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let directory = File::open(folder.path()).unwrap();
        let names = || fs::read_dir(folder.path()).unwrap().count();
        for (before, old) in [(0, None), (1, Some("old"))] {
            let _ = fs::remove_file(&path);
            if let Some(old) = old {
                fs::write(&path, old).unwrap();
            }
            let (file, naming) = create(&directory, "file", LARGE + 1).unwrap();
            File::from(file.try_clone().unwrap()).write_all(b"new").unwrap();
            assert_eq!((names(), fs::read_to_string(&path).ok().as_deref()), (before, old));
            naming.finish(&file, &directory, "file").unwrap();
            assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "new".to_owned()));
        }
    }

    #[test]
    fn a_small_file_has_its_name_at_once_and_takes_it_from_a_link_not_from_its_target() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("target"), "kept").unwrap();
        std::os::unix::fs::symlink("target", folder.path().join("file")).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let (file, naming) = create(&directory, "file", LARGE).unwrap();
        File::from(file.try_clone().unwrap()).write_all(b"new").unwrap();
        naming.finish(&file, &directory, "file").unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(folder.path().join("target")).unwrap(), "kept");
    }

    #[test]
    fn a_directory_does_not_give_way_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        let directory = File::open(folder.path()).unwrap();
        assert!(create(&directory, "sub", 0).is_err());
        let (file, naming) = create(&directory, "sub", LARGE + 1).unwrap();
        assert_eq!(naming.finish(file, &directory, "sub"), Err(Errno::ISDIR));
        assert!(folder.path().join("sub").is_dir());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_system_without_unnamed_files_is_told_from_one_that_fails() {
        assert!(unnamed(File::open("/proc").unwrap()).unwrap().is_none());
        assert!(unnamed(tempfile::tempfile().unwrap()).is_err());
    }
}
