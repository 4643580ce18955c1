//! Unpacks an archive from a guest, which may be hostile, below a directory of this machine.
//!
//! Every name is resolved by the kernel beneath the directory (openat2, RESOLVE_BENEATH): no `..`, no link, old or new,
//! leads out of it, and one that would is an error.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use imp_protocol::archive_time;
use imp_sys::allowance::Allowance;
use imp_sys::{new_file, sparse};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, chownat, fchmod,
    futimens, linkat, mkdirat, mknodat, openat, openat2, statat, symlinkat, utimensat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use super::Owners;
use super::left_out::LeftOut;

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Bytes of headers, long names and extended records before one member: the library keeps them in memory.
const MOST_RECORDS: u64 = 1 << 20;
const BUFFER: usize = 256 << 10;
/// Directories whose mode and time are set at the end.
const MOST_DIRECTORIES: usize = 1 << 18;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot open {path}")]
    Top {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the archive from the VM is broken")]
    Archive(#[source] io::Error),
    #[error("the archive from the VM has a member {0:?}, which would leave the directory it goes to")]
    Leaves(PathBuf),
    #[error("cannot write {path}")]
    Member {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the archive from the VM should hold one file and holds {0:?}")]
    NotOne(PathBuf),
}

/// What the archive's members become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Into<'a> {
    /// What they are called in it, below the directory, which gets these attributes if it is new.
    Tree(Option<OfSource>),
    /// The archive has one, and it gets this name.
    Entry(&'a OsStr),
}

/// Attributes of a directory whose content is copied: an archive of a VM does not hold them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct OfSource {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified_nanoseconds: i64,
}

pub(super) fn unpack(
    reader: impl Read,
    directory: &Path,
    members: Into<'_>,
    owners: Owners,
) -> Result<LeftOut, Error> {
    let top = openat(CWD, directory, DIRECTORY, Mode::empty())
        .map_err(|error| Error::Top { path: directory.to_owned(), source: error.into() })?;
    let allowance = Allowance::of(MOST_RECORDS);
    let mut unpacker = Unpacker {
        top,
        owners,
        directories: Vec::new(),
        left_out: LeftOut::default(),
        buffer: vec![0; BUFFER],
    };
    if let Into::Tree(Some(source)) = members {
        let attributes = unpacker.told(source.mode, source.modified_nanoseconds, source.uid, source.gid);
        unpacker.directories.push((PathBuf::from("."), attributes));
    }
    let mut archive = Archive::new(allowance.bound(reader));
    for (number, entry) in archive.entries().map_err(Error::Archive)?.enumerate() {
        let mut entry = entry.map_err(Error::Archive)?;
        allowance.lift();
        let path = match members {
            Into::Tree(_) => beneath(&entry.path_bytes())?,
            Into::Entry(_) if number > 0 || entry.header().entry_type().is_dir() => {
                return Err(Error::NotOne(entry.path_bytes().into_owned().into_path()));
            }
            Into::Entry(name) => PathBuf::from(name),
        };
        unpacker.member(&mut entry, &path)?;
        // What is left of the member is passed over here, where it may be long.
        io::copy(&mut entry, &mut io::sink()).map_err(Error::Archive)?;
        allowance.set(MOST_RECORDS);
    }
    unpacker.finish_directories()?;
    Ok(unpacker.left_out)
}

trait IntoPath {
    fn into_path(self) -> PathBuf;
}

impl IntoPath for Vec<u8> {
    fn into_path(self) -> PathBuf {
        OsString::from_vec(self).into()
    }
}

/// The name of a member as a path that has only names in it; empty for the directory itself.
fn beneath(name: &[u8]) -> Result<PathBuf, Error> {
    let name = Path::new(OsStr::from_bytes(name));
    let mut path = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(Error::Leaves(name.to_owned())),
        }
    }
    Ok(path)
}

struct Unpacker {
    top: OwnedFd,
    owners: Owners,
    /// Set at the end: a directory may be read-only, and what is made in it changes its time.
    directories: Vec<(PathBuf, Attributes)>,
    left_out: LeftOut,
    buffer: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Attributes {
    mode: Mode,
    modified: Timespec,
    owner: Option<(Uid, Gid)>,
}

impl Attributes {
    fn times(&self) -> Timestamps {
        Timestamps { last_access: self.modified, last_modification: self.modified }
    }
}

impl Unpacker {
    fn member(&mut self, entry: &mut Entry<'_, impl Read>, path: &Path) -> Result<(), Error> {
        let attributes = self.attributes(entry)?;
        let failed = |error: Errno| match error {
            Errno::XDEV | Errno::LOOP => Error::Leaves(path.to_owned()),
            error => Error::Member { path: path.to_owned(), source: error.into() },
        };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            // The directory itself: it is the user's, and stays as it is.
            return Ok(());
        };
        let parent = self.directory(parent).map_err(failed)?;
        match entry.header().entry_type() {
            EntryType::Directory => {
                self.make(&parent, name).map_err(failed)?;
                if self.directories.len() < MOST_DIRECTORIES {
                    self.directories.push((path.to_owned(), attributes));
                }
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let (file, naming) = new_file::create(&parent, name, entry.size()).map_err(failed)?;
                let mut file = std::fs::File::from(file);
                let length =
                    sparse::copy(entry, &mut file, &mut self.buffer).map_err(|error| match error {
                        sparse::Error::Read(source) => Error::Archive(source),
                        sparse::Error::Write(source) => Error::Member { path: path.to_owned(), source },
                    })?;
                // The library takes the end of the stream for that of the file.
                if length != entry.size() {
                    return Err(Error::Archive(io::ErrorKind::UnexpectedEof.into()));
                }
                set(&file, attributes).map_err(failed)?;
                naming.finish(&file, &parent, name).map_err(failed)?;
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default();
                new_file::clear(&parent, name).map_err(failed)?;
                symlinkat(OsStr::from_bytes(&target), &parent, name).map_err(failed)?;
                set_unopened(&parent, name, attributes).map_err(failed)?;
            }
            EntryType::Link => {
                let target = beneath(&entry.link_name_bytes().unwrap_or_default())?;
                let (Some(from), Some(old)) = (target.parent(), target.file_name()) else {
                    return Err(Error::Leaves(target));
                };
                let from = self.directory(from).map_err(failed)?;
                new_file::clear(&parent, name).map_err(failed)?;
                linkat(&from, old, &parent, name, AtFlags::empty()).map_err(failed)?;
            }
            EntryType::Fifo => {
                new_file::clear(&parent, name).map_err(failed)?;
                mknodat(&parent, name, FileType::Fifo, attributes.mode, 0).map_err(failed)?;
                set_unopened(&parent, name, attributes).map_err(failed)?;
            }
            EntryType::Char | EntryType::Block => self.left_out.add(path, "a device"),
            // Records of the archive itself, and kinds that nobody has thought of yet.
            _ => {}
        }
        Ok(())
    }

    fn attributes(&self, entry: &mut Entry<'_, impl Read>) -> Result<Attributes, Error> {
        let recorded = recorded_time(entry)?;
        let header = entry.header();
        let narrow = |id: u64| u32::try_from(id).unwrap_or(u32::MAX - 1);
        let (uid, gid) = match self.owners {
            Owners::TheCopiers => (0, 0),
            Owners::Kept => {
                (narrow(header.uid().map_err(Error::Archive)?), narrow(header.gid().map_err(Error::Archive)?))
            }
        };
        let modified = match recorded {
            Some(modified) => modified,
            None => archive_time::of_field(header.mtime().map_err(Error::Archive)?),
        };
        Ok(self.told(header.mode().map_err(Error::Archive)?, modified, uid, gid))
    }

    /// What is taken over of the attributes that something has in the VM.
    fn told(&self, mode: u32, modified_nanoseconds: i64, uid: u32, gid: u32) -> Attributes {
        let owner = match self.owners {
            Owners::TheCopiers => None,
            Owners::Kept => Some((Uid::from_raw(uid), Gid::from_raw(gid))),
        };
        // A program that becomes somebody else is nobody's wish but an archivist's.
        let mask = if owner.is_some() { 0o7777 } else { 0o1777 };
        let modified = Timespec {
            tv_sec: modified_nanoseconds.div_euclid(1_000_000_000),
            tv_nsec: modified_nanoseconds.rem_euclid(1_000_000_000),
        };
        Attributes { mode: Mode::from_raw_mode(mode & mask), modified, owner }
    }

    /// Opens a directory of the archive, made if need be.
    fn directory(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        match openat2(&self.top, path, DIRECTORY, Mode::empty(), BENEATH) {
            Err(Errno::NOENT) => {}
            opened => return opened,
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::NOENT) };
        let parent = self.directory(parent)?;
        self.make(&parent, name)?;
        openat2(&self.top, path, DIRECTORY, Mode::empty(), BENEATH)
    }

    /// Makes a directory, or sees that there is one: also behind a link that stays beneath.
    fn make(&self, parent: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
        match mkdirat(parent, name, Mode::RWXU) {
            Err(Errno::EXIST) => match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(()),
                _ => openat2(parent, name, DIRECTORY, Mode::empty(), BENEATH).map(drop),
            },
            made => made,
        }
    }

    fn finish_directories(&mut self) -> Result<(), Error> {
        for (path, attributes) in std::mem::take(&mut self.directories).into_iter().rev() {
            let opened = openat2(&self.top, &path, DIRECTORY, Mode::empty(), BENEATH);
            opened
                .and_then(|directory| set(&directory, attributes))
                .map_err(|error| Error::Member { path, source: error.into() })?;
        }
        Ok(())
    }
}

fn set(file: impl AsFd, attributes: Attributes) -> Result<(), Errno> {
    if let Some((uid, gid)) = attributes.owner {
        rustix::fs::fchown(&file, Some(uid), Some(gid))?;
    }
    fchmod(&file, attributes.mode)?;
    futimens(&file, &attributes.times())
}

/// Of what cannot be opened: a link, a pipe.
fn set_unopened(parent: &OwnedFd, name: &OsStr, attributes: Attributes) -> Result<(), Errno> {
    if let Some((uid, gid)) = attributes.owner {
        chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    utimensat(parent, name, &attributes.times(), AtFlags::SYMLINK_NOFOLLOW)
}

/// What a member's records say of its time; the header says it of the others.
fn recorded_time(entry: &mut Entry<'_, impl Read>) -> Result<Option<i64>, Error> {
    let mut modified = None;
    for record in entry.pax_extensions().map_err(Error::Archive)?.into_iter().flatten() {
        let record = record.map_err(Error::Archive)?;
        if record.key_bytes() == archive_time::MODIFIED.as_bytes() {
            modified = std::str::from_utf8(record.value_bytes()).ok().and_then(archive_time::of_record);
        }
    }
    Ok(modified)
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
