//! What is known about a file without opening it, and the entries of a directory.

use std::ffi::OsStr;
use std::fs::{self, Metadata, ReadDir};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use imp_protocol::guest::FileStat;
use imp_protocol::guest::file_stat::Kind;

use super::error::Error;
use crate::accounts::Accounts;

/// Entries in one message.
const BATCH: usize = 512;

/// What a symlink at the end of a path stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    Follow,
    Keep,
}

pub(crate) fn of(path: &Path, links: Links) -> Result<FileStat, Error> {
    let metadata = match links {
        Links::Follow => fs::metadata(path),
        Links::Keep => fs::symlink_metadata(path),
    };
    let metadata = metadata.map_err(Error::file("cannot look at", path))?;
    Ok(describe(path.as_os_str(), path, &metadata))
}

fn describe(name: &OsStr, path: &Path, metadata: &Metadata) -> FileStat {
    let kind = metadata.file_type();
    let kind = match () {
        () if kind.is_file() => Kind::File,
        () if kind.is_dir() => Kind::Directory,
        () if kind.is_symlink() => Kind::Symlink,
        () if kind.is_fifo() => Kind::Fifo,
        () if kind.is_socket() => Kind::Socket,
        () if kind.is_char_device() => Kind::CharacterDevice,
        () if kind.is_block_device() => Kind::BlockDevice,
        () => Kind::Unknown,
    };
    let target = if kind == Kind::Symlink { fs::read_link(path).unwrap_or_default() } else { PathBuf::new() };
    FileStat {
        path: name.as_bytes().to_vec().into(),
        kind: kind.into(),
        size: metadata.size(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_nanoseconds: metadata
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(metadata.mtime_nsec()),
        link_target: target.into_os_string().into_encoded_bytes().into(),
        user: String::new(),
        group: String::new(),
    }
}

pub(crate) fn name_owners(accounts: &Accounts, stats: &mut [FileStat]) {
    let text =
        |name: Option<&[u8]>| name.map(|name| String::from_utf8_lossy(name).into_owned()).unwrap_or_default();
    for stat in stats {
        stat.user = text(accounts.user_name(stat.uid));
        stat.group = text(accounts.group_name(stat.gid));
    }
}

/// A directory that is read in batches.
#[derive(Debug)]
pub(crate) struct Listing {
    path: PathBuf,
    entries: ReadDir,
    accounts: Accounts,
}

impl Listing {
    pub(crate) fn open(path: PathBuf) -> Result<Self, Error> {
        let entries = fs::read_dir(&path).map_err(Error::file("cannot list", &path))?;
        Ok(Self { path, entries, accounts: Accounts::read() })
    }

    /// Empty at the end.
    pub(crate) fn next_batch(&mut self) -> Result<Vec<FileStat>, Error> {
        let mut batch = Vec::new();
        while batch.len() < BATCH {
            let Some(entry) = self.entries.next() else { break };
            let entry = entry.map_err(Error::file("cannot list", &self.path))?;
            // One that has just been removed is no error.
            if let Ok(metadata) = entry.metadata() {
                batch.push(describe(&entry.file_name(), &entry.path(), &metadata));
            }
        }
        batch.sort_by(|one, other| one.path.cmp(&other.path));
        name_owners(&self.accounts, &mut batch);
        Ok(batch)
    }
}
