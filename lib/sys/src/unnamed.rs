//! Files that have no name until they are whole: who is killed while he writes one leaves nothing, and what had the name
//! before has it still. Only between the two calls that give it the name nothing has it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;

/// An empty file of a directory, to be written by its owner; none where the file system knows only files with names.
pub fn create(directory: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match openat(directory, c".", flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(Some(file)),
        // As open(2) has it: the file system, the kernel, or a file system in user space does not know the flag.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives a file that [`create`] has made its name in that directory, in the place of what has it. A directory keeps its own.
pub fn name(file: impl AsFd, directory: impl AsFd, name: impl Arg + Copy) -> Result<(), Errno> {
    match unlinkat(&directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    // By its descriptor alone it could be linked only with CAP_DAC_READ_SEARCH.
    let open = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    linkat(CWD, open, directory, name, AtFlags::SYMLINK_FOLLOW)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_seen_when_it_gets_its_name_and_replaces_what_had_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let directory = File::open(folder.path()).unwrap();
        let mut file = File::from(create(&directory).unwrap().unwrap());
        file.write_all(b"new").unwrap();
        let names = || fs::read_dir(folder.path()).unwrap().count();
        assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "old".to_owned()));
        name(&file, &directory, "file").unwrap();
        assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "new".to_owned()));
    }

    #[test]
    fn a_directory_does_not_give_way_and_a_file_system_without_such_files_says_so() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let file = create(&directory).unwrap().unwrap();
        assert!(name(&file, &directory, "sub").is_err());
        assert!(folder.path().join("sub").is_dir());
        assert!(create(File::open("/proc").unwrap()).unwrap().is_none());
    }
}
