//! The files of an archive, in a directory or in a tar, read by name and never written anywhere.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};

use imp_sys::allowance::Allowance;

use super::Error;

/// Most entries of a tar.
const MOST_ENTRIES: usize = 200_000;
/// Largest decompressed archive, bytes.
const LARGEST: u64 = 256 << 30;
/// Links that lead to links.
const MOST_LINKS: usize = 8;
const LONGEST_NAME: usize = 4096;
/// Bytes of all names and links: they are kept.
const MOST_NAMES: usize = 64 << 20;
/// Bytes of headers, long names and extended records before one entry: the library keeps them in memory.
const MOST_RECORDS: u64 = 1 << 20;
const GZIP: [u8; 2] = [0x1f, 0x8b];

#[derive(Debug)]
pub(crate) struct Files {
    path: PathBuf,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Directory,
    Tar { file: File, entries: HashMap<String, Entry> },
}

#[derive(Debug)]
enum Entry {
    File { offset: u64, size: u64 },
    Link { to: String },
}

impl Files {
    pub(crate) fn directory(path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), kind: Kind::Directory })
    }

    pub(crate) fn tar(path: &Path, temporary: &Path) -> Result<Self, Error> {
        let open = |source| Error::Open { path: path.to_owned(), source };
        let mut file = open_regular(path).map_err(open)?;
        let mut magic = [0; 2];
        if file.read_exact_at(&mut magic, 0).is_ok() && magic == GZIP {
            file = decompress(file, path, temporary)?;
        }
        let entries = index(&mut file, path)?;
        Ok(Self { path: path.to_owned(), kind: Kind::Tar { file, entries } })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.open(name).is_ok()
    }

    /// A file's content and its size.
    pub(super) fn open(&self, name: &str) -> Result<(Box<dyn Read + '_>, u64), Error> {
        let missing =
            || Error::MissingFile { path: self.path.clone(), file: name.chars().take(300).collect() };
        match &self.kind {
            Kind::Directory => {
                // Names come from documents of the archive: they stay below it.
                let relative = Path::new(name);
                if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
                    return Err(missing());
                }
                let file = match open_regular(&self.path.join(relative)) {
                    Ok(file) => file,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing()),
                    Err(source) => return Err(Error::Read { path: self.path.join(relative), source }),
                };
                let size =
                    file.metadata().map_err(|source| Error::Read { path: self.path.clone(), source })?.len();
                Ok((Box::new(file), size))
            }
            Kind::Tar { file, entries } => {
                let (offset, size) = find(entries, name).ok_or_else(missing)?;
                Ok((Box::new(Section { file, position: offset, left: size }), size))
            }
        }
    }

    /// A small file, whole.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let (reader, size) = self.open(name)?;
        if size > limit {
            return Err(Error::TooLarge { path: self.path.clone(), file: name.to_owned(), limit });
        }
        let mut bytes = Vec::new();
        let read = reader.take(limit).read_to_end(&mut bytes);
        read.map_err(|source| Error::Read { path: self.path.clone(), source })?;
        Ok(bytes)
    }
}

/// Opens a file that is one: no FIFO makes this wait, no device is read.
fn open_regular(path: &Path) -> io::Result<File> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

/// A part of a file that several readers share.
struct Section<'a> {
    file: &'a File,
    position: u64,
    left: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let Some(buffer) = buffer.get_mut(..most) else { return Ok(0) };
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

fn find(entries: &HashMap<String, Entry>, name: &str) -> Option<(u64, u64)> {
    let mut name = name.to_owned();
    for _ in 0..=MOST_LINKS {
        match entries.get(&name)? {
            Entry::File { offset, size } => return Some((*offset, *size)),
            Entry::Link { to } => name.clone_from(to),
        }
    }
    None
}

/// Decompresses into a file that has no name, so that nothing is left whatever happens.
fn decompress(file: File, path: &Path, temporary: &Path) -> Result<File, Error> {
    let write = |source| Error::Blob(crate::blob::write_error(temporary, source));
    let mut plain = tempfile::tempfile_in(temporary).map_err(write)?;
    let mut decoder = flate2::read::MultiGzDecoder::new(BufReader::new(file));
    let mut buffer = vec![0; super::READ_SIZE];
    let mut total = 0;
    loop {
        let count =
            decoder.read(&mut buffer).map_err(|source| Error::Tar { path: path.to_owned(), source })?;
        if count == 0 {
            return Ok(plain);
        }
        total += count as u64;
        if total > LARGEST {
            return Err(Error::Bomb { path: path.to_owned(), limit: LARGEST });
        }
        plain.write_all(buffer.get(..count).unwrap_or_default()).map_err(write)?;
    }
}

/// Where each file of a tar is. Of two entries with one name the later counts, as when unpacking.
fn index(file: &mut File, path: &Path) -> Result<HashMap<String, Entry>, Error> {
    let damaged = |source| Error::Tar { path: path.to_owned(), source };
    let length = file.seek(SeekFrom::End(0)).map_err(damaged)?;
    file.rewind().map_err(damaged)?;
    let mut entries = HashMap::new();
    let allowance = Allowance::of(MOST_RECORDS);
    let mut archive = tar::Archive::new(allowance.bound(file));
    let mut names = 0;
    for (count, entry) in archive.entries_with_seek().map_err(damaged)?.enumerate() {
        let entry = entry.map_err(damaged)?;
        // Contents are passed over and not read.
        allowance.set(MOST_RECORDS);
        names += entry.path_bytes().len() + entry.link_name_bytes().map_or(0, |to| to.len());
        if count >= MOST_ENTRIES || names > MOST_NAMES {
            return Err(Error::Entries { path: path.to_owned(), limit: MOST_ENTRIES });
        }
        let Some(name) = normal(&entry.path_bytes(), "") else { continue };
        let kind = entry.header().entry_type();
        if kind.is_file() || kind.is_contiguous() {
            let (offset, size) = (entry.raw_file_position(), entry.size());
            if offset.checked_add(size).is_none_or(|end| end > length) {
                return Err(damaged(io::ErrorKind::UnexpectedEof.into()));
            }
            entries.insert(name, Entry::File { offset, size });
        } else if kind.is_symlink() || kind.is_hard_link() {
            let base =
                if kind.is_symlink() { name.rsplit_once('/').map_or("", |(base, _)| base) } else { "" };
            let to = entry.link_name_bytes().and_then(|to| normal(&to, base));
            entries.extend(to.map(|to| (name, Entry::Link { to })));
        }
    }
    Ok(entries)
}

/// A name without `.` and `..`; None if it leads out of the archive, or is no text.
fn normal(name: &[u8], base: &str) -> Option<String> {
    if name.len() > LONGEST_NAME {
        return None;
    }
    let mut parts: Vec<&str> = base.split('/').filter(|part| !part.is_empty()).collect();
    for part in std::str::from_utf8(name).ok()?.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}
