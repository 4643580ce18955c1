//! Packs a file or the members of a directory into a tar stream. Links are packed as links.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use bytes::Bytes;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat};
use rustix::io::Errno;
use tar::EntryType;

use super::header::{Described, padding, write_end};
use super::shown;
use crate::files::{CHUNK, Error, Pieces, Spare};

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// FIFOs and devices are not opened; a file that becomes one meanwhile does not hold the thread.
const FILE: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);
/// Most bytes of a file whose size says nothing: such a file is read before its header is written.
const MOST_MADE_UP: usize = 16 << 20;
/// Files with several names that are remembered; further ones are packed as files of their own.
const MOST_LINKED: usize = 1 << 18;
/// Bytes of names and of one value that a file's extended attributes may have.
const MOST_ATTRIBUTES: usize = 64 << 10;

/// File systems whose files are no content, as linux/magic.h numbers them.
const MADE_UP: [rustix::fs::FsWord; 11] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x1cd1,      // devpts
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x1980_0202, // mqueue
    0x4249_4e4d, // binfmt_misc
];

/// Where an archive goes.
pub(super) trait Output: Write {
    /// Writes a piece of content that the output may keep.
    fn give(&mut self, piece: Bytes) -> io::Result<()>;
    /// Tells of a member that is not in the archive.
    fn leave_out(&mut self, name: &[u8]) -> io::Result<()>;
}

/// `name` is that of a single file; members of a directory have their names below it.
pub(super) fn pack(path: &Path, name: &[u8], output: &mut impl Output) -> Result<(), Error> {
    let mut packer = Packer { output, linked: HashMap::new(), top: path, spare: Spare::default() };
    let failed = || Error::errno("cannot archive", path);
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map_err(failed())?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        packer.directory(openat(CWD, path, DIRECTORY, Mode::empty()).map_err(failed())?)?;
    } else {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let parent = openat(CWD, parent, DIRECTORY - OFlags::NOFOLLOW, Mode::empty()).map_err(failed())?;
        let own = path.file_name().unwrap_or_default();
        let own = CString::new(std::os::unix::ffi::OsStrExt::as_bytes(own)).unwrap_or_default();
        packer.member(&parent, &own, name, &stat)?;
    }
    write_end(packer.output).map_err(Error::Archive)
}

struct Packer<'a, O> {
    output: &'a mut O,
    /// First name of each file that has several.
    linked: HashMap<(u64, u64), Vec<u8>>,
    top: &'a Path,
    spare: Spare,
}

struct Level {
    directory: OwnedFd,
    device: u64,
    /// Names still to be packed, last first.
    rest: Vec<CString>,
    /// Length of the directory's own name within the member's.
    prefix: usize,
}

impl<O: Output> Packer<'_, O> {
    /// Depth costs open files, of which there are many, but no stack.
    fn directory(&mut self, top: OwnedFd) -> Result<(), Error> {
        let mut name = Vec::new();
        let failed = || Error::errno("cannot archive", self.top);
        let rest = names(&top).map_err(failed())?;
        let device = fstat(&top).map_err(failed())?.st_dev;
        let mut levels = vec![Level { directory: top, device, rest, prefix: 0 }];
        while let Some(level) = levels.last_mut() {
            name.truncate(level.prefix);
            let Some(own) = level.rest.pop() else {
                levels.pop();
                continue;
            };
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend_from_slice(own.to_bytes());
            let stat = match statat(&level.directory, &own, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // Removed meanwhile.
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(self.failed(&name, error)),
            };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.member(&level.directory, &own, &name, &stat)?;
                continue;
            }
            let child = match openat(&level.directory, &own, DIRECTORY, Mode::empty()) {
                Ok(child) => child,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(error) => return Err(self.failed(&name, error)),
            };
            let attributes = attributes(&child);
            let mut described = describe(&name, &stat, EntryType::Directory);
            described.attributes = &attributes;
            described.write(self.output).map_err(Error::Archive)?;
            if stat.st_dev != level.device && is_made_up(&child) {
                continue;
            }
            let rest = names(&child).map_err(|error| self.failed(&name, error))?;
            levels.push(Level { directory: child, device: stat.st_dev, rest, prefix: name.len() });
        }
        Ok(())
    }

    /// Anything but a directory.
    fn member(&mut self, parent: &OwnedFd, own: &CString, name: &[u8], stat: &Stat) -> Result<(), Error> {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryType::Regular,
            FileType::Symlink => EntryType::Symlink,
            FileType::Fifo => EntryType::Fifo,
            FileType::CharacterDevice => EntryType::Char,
            FileType::BlockDevice => EntryType::Block,
            // A socket is nothing without the process that listens on it; tar has no type for it.
            FileType::Socket => return self.output.leave_out(name).map_err(Error::Archive),
            FileType::Directory | FileType::Unknown => return Ok(()),
        };
        if stat.st_nlink > 1 {
            let room = self.linked.len() < MOST_LINKED;
            match self.linked.entry((stat.st_dev, stat.st_ino)) {
                Entry::Occupied(first) => {
                    let described =
                        Described { size: 0, link: first.get(), ..describe(name, stat, EntryType::Link) };
                    return described.write(self.output).map_err(Error::Archive);
                }
                Entry::Vacant(free) if room => drop(free.insert(name.to_vec())),
                Entry::Vacant(_) => {}
            }
        }
        let described = describe(name, stat, kind);
        match kind {
            EntryType::Symlink => {
                let target = readlinkat(parent, own, Vec::new()).map_err(|error| self.failed(name, error))?;
                Described { link: target.to_bytes(), ..described }.write(self.output).map_err(Error::Archive)
            }
            EntryType::Regular => self.file(parent, own, described),
            _ => described.write(self.output).map_err(Error::Archive),
        }
    }

    fn file(&mut self, parent: &OwnedFd, own: &CString, described: Described<'_>) -> Result<(), Error> {
        let file = match openat(parent, own, FILE, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
            Err(error) => return Err(self.failed(described.name, error)),
        };
        let attributes = attributes(&file);
        let described = Described { attributes: &attributes, ..described };
        if described.size <= CHUNK as u64 {
            return self.small_file(&file, described);
        }
        described.write(self.output).map_err(Error::Archive)?;
        // The header has promised this many bytes, whatever happens to the file meanwhile.
        let mut left = described.size;
        let mut pieces = Pieces::new(file, 0, left, self.spare.clone());
        while left > 0 {
            let read = pieces.next(left).map_err(|error| self.failed(described.name, error))?;
            if read.is_empty() {
                self.zeros(left)?;
                break;
            }
            left -= read.len() as u64;
            self.output.give(read).map_err(Error::Archive)?;
        }
        self.zeros(padding(described.size) as u64)
    }

    fn zeros(&mut self, count: u64) -> Result<(), Error> {
        io::copy(&mut io::repeat(0).take(count), self.output).map_err(Error::Archive)?;
        Ok(())
    }

    /// Read before its header is written: what the kernel makes up, as below /proc and /sys, is longer or shorter than its
    /// size says.
    fn small_file(&mut self, file: &OwnedFd, described: Described<'_>) -> Result<(), Error> {
        let expected = usize::try_from(described.size).unwrap_or(CHUNK);
        let mut content = Vec::with_capacity(expected + 1);
        loop {
            let read = rustix::io::read(file, rustix::buffer::spare_capacity(&mut content))
                .map_err(|error| self.failed(described.name, error))?;
            // One read is enough where the size is true.
            if read == 0 || (content.len() == expected && expected > 0) {
                break;
            }
            if content.len() > MOST_MADE_UP {
                return Err(self.failed(described.name, Errno::FBIG));
            }
            content.reserve(CHUNK);
        }
        let described = Described { size: content.len() as u64, ..described };
        described.write(self.output).map_err(Error::Archive)?;
        let padding = padding(described.size) as u64;
        self.output.give(content.into()).map_err(Error::Archive)?;
        self.zeros(padding)
    }

    fn failed(&self, name: &[u8], error: Errno) -> Error {
        Error::errno("cannot archive", &shown(self.top, name))(error)
    }
}

/// Whether the kernel makes up what is below: a tree that holds such a mount is archived without its files, of which some
/// cannot be read and others are larger than any disk.
fn is_made_up(mounted: &OwnedFd) -> bool {
    rustix::fs::fstatfs(mounted).is_ok_and(|system| MADE_UP.contains(&system.f_type))
}

fn describe<'a>(name: &'a [u8], stat: &Stat, kind: EntryType) -> Described<'a> {
    let device = matches!(kind, EntryType::Char | EntryType::Block)
        .then(|| (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)));
    Described {
        name,
        kind,
        link: &[],
        size: if kind == EntryType::Regular { stat.st_size.unsigned_abs() } else { 0 },
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified: (stat.st_mtime, stat.st_mtime_nsec as u32),
        device,
        attributes: &[],
    }
}

/// Names in a directory, last first, so that they are taken off the end in order.
fn names(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_by(|one, other| other.cmp(one));
    Ok(names)
}

/// Extended attributes; a file system without them has none.
fn attributes(file: &OwnedFd) -> Vec<(Vec<u8>, Vec<u8>)> {
    // Most files have none: no buffer for them.
    if rustix::fs::flistxattr_query(file).unwrap_or(0) == 0 {
        return Vec::new();
    }
    let mut list = Vec::with_capacity(MOST_ATTRIBUTES);
    if rustix::fs::flistxattr(file, rustix::buffer::spare_capacity(&mut list)).is_err() {
        return Vec::new();
    }
    let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .filter_map(|name| {
            let mut value = Vec::with_capacity(MOST_ATTRIBUTES);
            rustix::fs::fgetxattr(file, name, rustix::buffer::spare_capacity(&mut value)).ok()?;
            Some((name.to_vec(), value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_makes_up_is_told_from_what_is_stored() {
        let made_up = |path: &Path| is_made_up(&openat(CWD, path, DIRECTORY, Mode::empty()).unwrap());
        assert!(made_up(Path::new("/proc")) && made_up(Path::new("/sys")));
        assert!(!made_up(tempfile::tempdir().unwrap().path()));
    }
}
