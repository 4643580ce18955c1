//! Removes files and trees without following links.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use super::error::Error;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Directories that are open at once; deeper ones are reached again through their parents.
const MOST_OPEN: usize = 64;

/// A file, or an empty directory.
pub(crate) fn remove_one(path: &Path) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(path).map_err(Error::file("cannot remove", path))?;
    let removed = if metadata.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    removed.map_err(Error::file("cannot remove", path))
}

/// A file, or a directory with all that is in it. Depth costs neither stack nor open files: a tree that is deeper than
/// `MOST_OPEN` is worked off from the bottom in rounds.
pub(crate) fn remove_tree(path: &Path) -> Result<(), Error> {
    let failed = || Error::errno("cannot remove", path);
    match unlinkat(CWD, path, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        // A directory is answered with EPERM by some file systems.
        Err(Errno::PERM) if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) => {}
        result => return result.map_err(failed()),
    }
    loop {
        let top = openat(CWD, path, DIRECTORY, Mode::empty()).map_err(failed())?;
        if empty(top).map_err(failed())? == Progress::Emptied {
            break;
        }
    }
    unlinkat(CWD, path, AtFlags::REMOVEDIR).map_err(failed())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Emptied,
    /// What was too deep has been moved up: there is more to do.
    Shortened,
}

struct Level {
    directory: OwnedFd,
    /// Directories in it that are still to be removed.
    rest: Vec<CString>,
}

fn empty(top: OwnedFd) -> Result<Progress, Errno> {
    let mut progress = Progress::Emptied;
    let mut levels = vec![Level { rest: remove_files(&top)?, directory: top }];
    let mut moved = 0_u64;
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.rest.last().cloned() else {
            levels.pop();
            // The directory that this level was is the last one in its parent's list.
            if let Some(parent) = levels.last_mut()
                && let Some(name) = parent.rest.pop()
            {
                ignore_missing(unlinkat(&parent.directory, &name, AtFlags::REMOVEDIR))?;
            }
            continue;
        };
        let child = match openat(&level.directory, &name, DIRECTORY, Mode::empty()) {
            Ok(child) => child,
            Err(Errno::NOENT) => {
                level.rest.pop();
                continue;
            }
            Err(error) => return Err(error),
        };
        if levels.len() < MOST_OPEN {
            levels.push(Level { rest: remove_files(&child)?, directory: child });
            continue;
        }
        // Too deep: the subtree moves up to the top under a name of its own, and the next round takes it from there.
        if let (Some(first), Some(last)) = (levels.first(), levels.last()) {
            loop {
                let free = format!(".imp-removed-{moved}");
                moved += 1;
                match rustix::fs::renameat_with(
                    &last.directory,
                    &name,
                    &first.directory,
                    &free,
                    rustix::fs::RenameFlags::NOREPLACE,
                ) {
                    Err(Errno::EXIST) => {}
                    result => break result?,
                }
            }
        }
        if let Some(level) = levels.last_mut() {
            level.rest.pop();
        }
        progress = Progress::Shortened;
    }
    Ok(progress)
}

/// Removes what is no directory and returns the names of what is.
fn remove_files(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            directories.push(name.to_owned());
            continue;
        }
        match unlinkat(directory, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => directories.push(name.to_owned()),
            result => ignore_missing(result)?,
        }
    }
    Ok(directories)
}

fn ignore_missing(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::NOENT) => Ok(()),
        // What was moved up is in the way of the top directory until the next round.
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_deeper_than_the_open_files_goes_and_what_its_links_lead_to_stays() {
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "kept").unwrap();
        let top = directory.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut level = openat(CWD, &top, DIRECTORY, Mode::empty()).unwrap();
        for depth in 0..3000 {
            rustix::fs::symlinkat(&outside, &level, "link").unwrap();
            rustix::fs::mkdirat(&level, "a", Mode::RWXU).unwrap();
            if depth % 100 == 0 {
                rustix::fs::mkdirat(&level, "b", Mode::RWXU).unwrap();
            }
            level = openat(&level, "a", DIRECTORY, Mode::empty()).unwrap();
        }
        remove_tree(&top).unwrap();
        assert!(!top.exists());
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        std::os::unix::fs::symlink(&outside, &top).unwrap();
        remove_tree(&top).unwrap();
        assert!(outside.join("kept").exists() && fs::symlink_metadata(&top).is_err());
    }
}
