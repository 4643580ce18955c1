//! Unpacks a tar stream below a directory.
//!
//! Every name is resolved by the kernel with the directory as its root (openat2, RESOLVE_IN_ROOT), so that no link, old or
//! new, leads out. What is in the way of a member is replaced, except that a directory stays one, and so does a link to
//! a directory where the archive has a directory.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use imp_protocol::archive_time;
use imp_sys::allowance::Allowance;
use imp_sys::new_file;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, XattrFlags, chownat, linkat, mkdirat,
    mknodat, openat, openat2, symlinkat, utimensat,
};
use rustix::io::Errno;
use tar::{Archive, EntryType};

use super::member::MemberName;
use super::shown;
use crate::files::{Content, Error, NewAttributes, Piece, Zeros};

const INSIDE: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Bytes of headers, long names and extended records before one member: the library keeps them in memory.
const MOST_RECORDS: u64 = 1 << 20;
/// Directories whose time is set at the end.
const MOST_TIMES: usize = 1 << 18;

/// Owner of everything, instead of the archive's own.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Owner {
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unpacked {
    pub(super) entries: u64,
    pub(super) bytes: u64,
}

/// `goes_on` is asked again and again: the length of a hole costs its sender nothing, so that unpacking may go on long
/// after the sender has left.
pub(super) fn unpack(
    path: &Path,
    owner: Owner,
    reader: impl Read,
    goes_on: &dyn Fn() -> bool,
) -> Result<Unpacked, Error> {
    std::fs::create_dir_all(path).map_err(Error::file("cannot make the directory", path))?;
    let top = openat(CWD, path, DIRECTORY, Mode::empty()).map_err(Error::errno("cannot open", path))?;
    let mut unpacker = Unpacker {
        path,
        top,
        owner,
        goes_on,
        parent: None,
        times: Vec::new(),
        done: Unpacked::default(),
        piece: Piece::default(),
    };
    let allowance = Allowance::of(MOST_RECORDS);
    let mut archive = Archive::new(allowance.bound(reader));
    for entry in archive.entries().map_err(Error::Archive)? {
        allowance.lift();
        unpacker.member(entry.map_err(Error::Archive)?)?;
        allowance.set(MOST_RECORDS);
    }
    if allowance.ended() {
        // Between two members a stream that broke looks like one that is whole, but for the empty blocks at the end.
        return Err(Error::Archive(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "it has no end: the stream broke, or the archive was written without its last two blocks",
        )));
    }
    unpacker.set_times()?;
    Ok(unpacker.done)
}

struct Unpacker<'a> {
    path: &'a Path,
    top: OwnedFd,
    owner: Owner,
    goes_on: &'a dyn Fn() -> bool,
    /// The last directory that was looked up: members of one directory follow each other.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Directories and their times: what is put into a directory changes its time.
    times: Vec<(MemberName, i64)>,
    done: Unpacked,
    piece: Piece,
}

impl Unpacker<'_> {
    fn member(&mut self, mut entry: tar::Entry<'_, impl Read>) -> Result<(), Error> {
        let name = MemberName::parse(&entry.path_bytes())?;
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader) {
            return Ok(());
        }
        let extended = Extended::read(&mut entry)?;
        let header = entry.header();
        let number = |result: std::io::Result<u64>| result.map_err(Error::Archive);
        let attributes = NewAttributes {
            mode: header.mode().map_err(Error::Archive)? & 0o7777,
            uid: self.owner.uid.or(extended.uid).unwrap_or(number(header.uid())? as u32),
            gid: self.owner.gid.or(extended.gid).unwrap_or(number(header.gid())? as u32),
            modified_nanoseconds: Some(match extended.modified {
                Some(modified) => modified,
                None => archive_time::of_field(number(header.mtime())?),
            }),
        };
        self.done.entries += 1;
        let Some((directory, own)) = name.split() else {
            // The directory itself.
            let top = self.reopen(&name)?;
            attributes.apply(&top).map_err(self.failed(&name))?;
            return Ok(());
        };
        if kind.is_dir() {
            return self.directory(&name, directory, own, &attributes, &extended);
        }
        self.parent_of(&name, directory)?;
        if matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse) {
            return self.file(&name, own, &mut entry, &attributes, &extended);
        }
        self.clear_the_way(&name, own)?;
        let failed = self.failed(&name);
        let parent = self.parent(&name)?;
        match kind {
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                symlinkat(&target[..], parent, own).map_err(failed)?;
                self.apply_to_link(&name, own, &attributes)
            }
            EntryType::Link => {
                let target = MemberName::parse(&entry.link_name_bytes().unwrap_or_default())?;
                self.hard_link(&name, own, &target)
            }
            EntryType::Fifo | EntryType::Char | EntryType::Block => {
                let file_type = match kind {
                    EntryType::Char => FileType::CharacterDevice,
                    EntryType::Block => FileType::BlockDevice,
                    _ => FileType::Fifo,
                };
                let number = |part: std::io::Result<Option<u32>>| part.ok().flatten().unwrap_or(0);
                let device =
                    rustix::fs::makedev(number(header.device_major()), number(header.device_minor()));
                mknodat(parent, own, file_type, Mode::from_raw_mode(attributes.mode), device)
                    .map_err(failed)?;
                rustix::fs::chmodat(parent, own, Mode::from_raw_mode(attributes.mode), AtFlags::empty())
                    .map_err(self.failed(&name))?;
                self.apply_to_link(&name, own, &attributes)
            }
            _ => Err(Error::Member(
                shown(self.path, name.as_bytes()).display().to_string(),
                "its type is not known",
            )),
        }
    }

    fn directory(
        &mut self,
        name: &MemberName,
        directory: &[u8],
        own: &[u8],
        attributes: &NewAttributes,
        extended: &Extended,
    ) -> Result<(), Error> {
        self.parent_of(name, directory)?;
        match mkdirat(self.parent(name)?, own, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                if openat2(&self.top, name.as_bytes(), DIRECTORY, Mode::empty(), INSIDE).is_err() {
                    self.clear_the_way(name, own)?;
                    mkdirat(self.parent(name)?, own, Mode::RWXU).map_err(self.failed(name))?;
                }
            }
            Err(error) => return Err(self.failed(name)(error)),
        }
        let made = self.reopen(name)?;
        attributes.apply(&made).map_err(self.failed(name))?;
        extended.apply(&made);
        if let Some(modified) = attributes.modified_nanoseconds.filter(|_| self.times.len() < MOST_TIMES) {
            self.times.push((name.clone(), modified));
        }
        Ok(())
    }

    fn file(
        &mut self,
        name: &MemberName,
        own: &[u8],
        entry: &mut tar::Entry<'_, impl Read>,
        attributes: &NewAttributes,
        extended: &Extended,
    ) -> Result<(), Error> {
        let (file, naming) =
            new_file::create(self.parent(name)?, own, entry.size()).map_err(self.failed(name))?;
        let mut left = entry.size();
        let mut content = Content::new(file, std::mem::take(&mut self.piece), Zeros::Holes);
        loop {
            let room = content.room().map_err(self.failed(name))?;
            let count = entry.read(room).map_err(Error::Archive)?;
            if count == 0 {
                break;
            }
            if !(self.goes_on)() {
                return Err(Error::Archive(io::ErrorKind::BrokenPipe.into()));
            }
            left = left.saturating_sub(count as u64);
            self.done.bytes += count as u64;
            content.advance(count).map_err(self.failed(name))?;
        }
        let (file, piece) = content.finish().map_err(self.failed(name))?;
        self.piece = piece;
        // The library takes the end of the stream for that of the file.
        if left > 0 {
            return Err(Error::Archive(io::ErrorKind::UnexpectedEof.into()));
        }
        // Owner and mode first: changing the owner takes capabilities away.
        attributes.apply(&file).map_err(self.failed(name))?;
        extended.apply(&file);
        naming.finish(&file, self.parent(name)?, own).map_err(self.failed(name))
    }

    fn hard_link(&mut self, name: &MemberName, own: &[u8], target: &MemberName) -> Result<(), Error> {
        let Some((directory, target_own)) = target.split() else {
            return Err(Error::Member(
                shown(self.path, name.as_bytes()).display().to_string(),
                "it links to a directory",
            ));
        };
        let target_parent = openat2(&self.top, here(directory), DIRECTORY, Mode::empty(), INSIDE)
            .map_err(self.failed(target))?;
        linkat(&target_parent, target_own, self.parent(name)?, own, AtFlags::empty())
            .map_err(self.failed(target))
    }

    fn apply_to_link(&self, name: &MemberName, own: &[u8], attributes: &NewAttributes) -> Result<(), Error> {
        let parent = self.parent(name)?;
        let (uid, gid) = (Some(Uid::from_raw(attributes.uid)), Some(Gid::from_raw(attributes.gid)));
        chownat(parent, own, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(self.failed(name))?;
        let modified = crate::files::modified(attributes.modified_nanoseconds.unwrap_or(0));
        utimensat(parent, own, &modified, AtFlags::SYMLINK_NOFOLLOW).map_err(self.failed(name))
    }

    /// Removes what is no directory.
    fn clear_the_way(&self, name: &MemberName, own: &[u8]) -> Result<(), Error> {
        new_file::clear(self.parent(name)?, own).map_err(self.failed(name))
    }

    /// Looks the member's directory up, and makes it when it is missing.
    fn parent_of(&mut self, name: &MemberName, directory: &[u8]) -> Result<(), Error> {
        if self.parent.as_ref().is_some_and(|(path, _)| path == directory) {
            return Ok(());
        }
        let found = match openat2(&self.top, here(directory), DIRECTORY, Mode::empty(), INSIDE) {
            Err(Errno::NOENT) => self.make_directories(directory),
            other => other,
        };
        self.parent = Some((directory.to_vec(), found.map_err(self.failed(name))?));
        Ok(())
    }

    fn make_directories(&self, directory: &[u8]) -> Result<OwnedFd, Errno> {
        let mut parent = openat2(&self.top, c".", DIRECTORY, Mode::empty(), INSIDE)?;
        let mut end = 0;
        for part in directory.split(|byte| *byte == b'/') {
            end += part.len() + usize::from(end > 0);
            let path = directory.get(..end).unwrap_or_default();
            parent = match openat2(&self.top, path, DIRECTORY, Mode::empty(), INSIDE) {
                Err(Errno::NOENT) => {
                    mkdirat(&parent, part, Mode::from_raw_mode(0o755))?;
                    openat2(&self.top, path, DIRECTORY, Mode::empty(), INSIDE)?
                }
                other => other?,
            };
        }
        Ok(parent)
    }

    fn parent(&self, name: &MemberName) -> Result<&OwnedFd, Error> {
        self.parent.as_ref().map(|(_, fd)| fd).ok_or_else(|| self.failed(name)(Errno::NOENT))
    }

    /// A directory, opened so that its attributes can be set.
    fn reopen(&self, name: &MemberName) -> Result<OwnedFd, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat2(&self.top, here(name.as_bytes()), flags, Mode::empty(), INSIDE).map_err(self.failed(name))
    }

    fn set_times(&self) -> Result<(), Error> {
        for (name, modified) in self.times.iter().rev() {
            // One that a later member has replaced has no time to set.
            if let Ok(directory) = self.reopen(name) {
                rustix::fs::futimens(&directory, &crate::files::modified(*modified))
                    .map_err(self.failed(name))?;
            }
        }
        Ok(())
    }

    fn failed(&self, name: &MemberName) -> impl FnOnce(Errno) -> Error + use<> {
        let path = shown(self.path, name.as_bytes());
        move |error| Error::errno("cannot unpack", &path)(error)
    }
}

/// The empty name is the directory itself.
fn here(name: &[u8]) -> &[u8] {
    if name.is_empty() { b"." } else { name }
}

/// What PAX records say beyond the header.
#[derive(Debug, Default)]
struct Extended {
    modified: Option<i64>,
    uid: Option<u32>,
    gid: Option<u32>,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Extended {
    fn read(entry: &mut tar::Entry<'_, impl Read>) -> Result<Self, Error> {
        let mut extended = Self::default();
        let entry_name = entry.path_bytes().into_owned();
        let Some(records) = entry.pax_extensions().map_err(Error::Archive)? else { return Ok(extended) };
        for record in records {
            let record = record.map_err(Error::Archive)?;
            let text = || std::str::from_utf8(record.value_bytes()).ok();
            match record.key_bytes() {
                key if key == archive_time::MODIFIED.as_bytes() => {
                    extended.modified = text().and_then(archive_time::of_record);
                }
                b"uid" => extended.uid = text().and_then(|uid| uid.parse().ok()),
                b"gid" => extended.gid = text().and_then(|gid| gid.parse().ok()),
                // Its content is a map and then the parts: unpacked as it stands it would be another file.
                key if key.starts_with(b"GNU.sparse.") => {
                    let name = String::from_utf8_lossy(&entry_name).into_owned();
                    return Err(Error::Member(name, "it is sparse in PAX's way; pack it without --sparse"));
                }
                key => {
                    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                        extended.attributes.push((name.to_vec(), record.value_bytes().to_vec()));
                    }
                }
            }
        }
        Ok(extended)
    }

    /// A file system that does not take one of them still takes the file.
    fn apply(&self, file: &OwnedFd) {
        for (name, value) in self.attributes.iter().filter(|(name, _)| !name.contains(&0)) {
            let _ = rustix::fs::fsetxattr(file, &name[..], value, XattrFlags::empty());
        }
    }
}
