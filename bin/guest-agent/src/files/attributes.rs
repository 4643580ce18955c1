//! Owner, mode and time of files.

use std::fs::{self, DirBuilder};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use imp_protocol::guest;
use rustix::fs::{AtFlags, CWD, Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid};

use super::error::Error;
use super::stat::Links;

/// Attributes to set; absent ones stay.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attributes {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) modified_nanoseconds: Option<i64>,
}

impl From<Option<guest::Attributes>> for Attributes {
    fn from(attributes: Option<guest::Attributes>) -> Self {
        let attributes = attributes.unwrap_or_default();
        Self {
            mode: attributes.mode.map(|mode| mode & 0o7777),
            uid: attributes.uid,
            gid: attributes.gid,
            modified_nanoseconds: attributes.modified_nanoseconds,
        }
    }
}

impl Attributes {
    /// To an open file, in the same order as [`NewAttributes::apply`].
    pub(crate) fn apply(&self, file: impl AsFd) -> rustix::io::Result<()> {
        if self.uid.is_some() || self.gid.is_some() {
            rustix::fs::fchown(&file, self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw))?;
        }
        if let Some(mode) = self.mode {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
        }
        match self.modified_nanoseconds {
            Some(nanoseconds) => rustix::fs::futimens(&file, &modified(nanoseconds)),
            None => Ok(()),
        }
    }
}

/// Attributes of a file that does not exist yet: all of them are known but its time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewAttributes {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified_nanoseconds: Option<i64>,
}

impl NewAttributes {
    /// To an open file. The owner comes first: changing it clears setuid and setgid.
    pub(crate) fn apply(&self, file: impl AsFd) -> rustix::io::Result<()> {
        rustix::fs::fchown(&file, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(self.mode))?;
        match self.modified_nanoseconds {
            Some(nanoseconds) => rustix::fs::futimens(&file, &modified(nanoseconds)),
            None => Ok(()),
        }
    }
}

/// Sets the modification time and leaves the access time.
pub(crate) fn modified(nanoseconds: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: nanoseconds.div_euclid(1_000_000_000),
            tv_nsec: nanoseconds.rem_euclid(1_000_000_000),
        },
    }
}

pub(crate) fn set(path: &Path, attributes: &Attributes, links: Links) -> Result<(), Error> {
    let flags = match links {
        Links::Follow => AtFlags::empty(),
        Links::Keep => AtFlags::SYMLINK_NOFOLLOW,
    };
    if attributes.uid.is_some() || attributes.gid.is_some() {
        let (uid, gid) = (attributes.uid.map(Uid::from_raw), attributes.gid.map(Gid::from_raw));
        rustix::fs::chownat(CWD, path, uid, gid, flags)
            .map_err(Error::errno("cannot change the owner of", path))?;
    }
    if let Some(mode) = attributes.mode {
        let is_link =
            links == Links::Keep && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
        // The mode of a link means nothing, and the kernel refuses to set one.
        if !is_link {
            rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())
                .map_err(Error::errno("cannot change the mode of", path))?;
        }
    }
    if let Some(nanoseconds) = attributes.modified_nanoseconds {
        rustix::fs::utimensat(CWD, path, &modified(nanoseconds), flags)
            .map_err(Error::errno("cannot change the time of", path))?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parents {
    Make,
    MustExist,
}

/// With `Parents::Make` a directory that exists is fine, and its attributes are set.
pub(crate) fn make_directory(path: &Path, parents: Parents, attributes: &Attributes) -> Result<(), Error> {
    let failed = "cannot make the directory";
    if parents == Parents::Make {
        make_parents(path)?;
    }
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error)
            if parents == Parents::Make
                && error.raw_os_error() == Some(rustix::io::Errno::EXIST.raw_os_error())
                && path.is_dir() => {}
        made => made.map_err(Error::file(failed, path))?,
    }
    set(path, attributes, Links::Follow)
}

pub(crate) fn make_parents(path: &Path) -> Result<(), Error> {
    let Some(parent) = path.parent() else { return Ok(()) };
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(parent)
        .map_err(Error::file("cannot make the directory", parent))
}
