//! Carries each entry from its tar to its place: the tree gets the name, the writer gets the content.

use std::io;
use std::path::Path;

use super::layers::{Failed, Unpacked};
use super::merge::{Change, Hidden, Merge};
use super::tar::{self, Kind, Member, Reader, Segment};
use super::{Error, LayerSource, Limits, Refusal, acl};
use crate::blob::digest::Digest;
use crate::ext4::{
    Attributes, Content, MOST_FILE_BYTES, MOST_TARGET_BYTES, Tree, Writer, Xattr, xattr_storable, xattrs_fit,
};

pub(super) struct Build<'a> {
    merge: Merge<'a>,
    writer: Writer,
    limits: &'a Limits,
    /// Where errors say that writing failed.
    path: &'a Path,
    xattrs_dropped: u64,
}

/// What is left to do when all layers are in.
pub(super) struct Built {
    pub(super) tree: Tree,
    pub(super) writer: Writer,
    pub(super) entries: u64,
    pub(super) xattrs_dropped: u64,
}

impl<'a> Build<'a> {
    pub(super) fn new(writer: Writer, limits: &'a Limits, path: &'a Path) -> Self {
        Self { merge: Merge::new(limits), writer, limits, path, xattrs_dropped: 0 }
    }

    /// Lays the next layer over what is there; gives its diff id, verified where it is known.
    pub(super) fn layer(
        &mut self,
        layer: &LayerSource,
        unpacked: &mut Unpacked,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Digest, Error> {
        self.merge.begin_layer();
        let limits = self.limits;
        let mut reader = Reader::new(&mut *unpacked, limits);
        let mut reported = 0;
        while let Some(member) = reader.next().map_err(|error| refused(layer, &[], error))? {
            let path = member.path.clone();
            self.entry(member, &mut reader).map_err(|trouble| self.entry_error(layer, &path, trouble))?;
            let read = reader.source().bytes_read();
            if read != reported {
                reported = read;
                progress(read);
            }
        }
        match self.merge.end_layer() {
            Ok(hidden) => self.give_back(&hidden),
            Err((path, reason)) => return Err(entry(layer, &path, reason)),
        }
        // What follows the end of the tar counts for the diff id, too.
        let found = unpacked.end_layer().map_err(|error| unpacking(layer, error))?;
        match layer.diff_id {
            Some(expected) if expected != found => {
                Err(Error::DiffId { layer: layer.digest, expected, found })
            }
            Some(_) | None => Ok(found),
        }
    }

    pub(super) fn end(self) -> Built {
        let (entries, xattrs_dropped) = (self.merge.entries(), self.xattrs_dropped);
        Built { tree: self.merge.tree, writer: self.writer, entries, xattrs_dropped }
    }

    fn entry(&mut self, member: Member, reader: &mut Reader<'_, &mut Unpacked>) -> Result<(), Trouble> {
        let xattr_bytes: usize =
            member.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len() + 64).sum();
        self.merge.count(member.path.len() + xattr_bytes + 256)?;
        if let Some(hidden) = self.merge.whiteout(&member.path)? {
            self.give_back(&hidden);
            return Ok(());
        }
        let attributes = self.attributes(&member)?;
        let change = match member.kind {
            Kind::Directory => Change::Directory(attributes),
            Kind::HardLink(target) => Change::HardLink(target),
            Kind::Symlink(target) => {
                if target.is_empty() || target.len() > MOST_TARGET_BYTES || target.contains(&0) {
                    return Err(Refusal::SymlinkTarget.into());
                }
                Change::Place(attributes, Content::Symlink(target.into()))
            }
            Kind::Device { kind, major, minor } => {
                Change::Place(attributes, Content::Device { kind, major, minor })
            }
            Kind::Fifo => Change::Place(attributes, Content::Fifo),
            Kind::File { size, segments } => {
                Change::Place(attributes, self.file(&member.path, size, &segments, reader)?)
            }
        };
        let hidden = self.merge.put(&member.path, change)?;
        self.give_back(&hidden);
        Ok(())
    }

    /// Writes the content of a file into blocks.
    fn file(
        &mut self,
        path: &[u8],
        size: u64,
        segments: &[Segment],
        reader: &mut Reader<'_, &mut Unpacked>,
    ) -> Result<Content, Trouble> {
        if size > MOST_FILE_BYTES {
            return Err(Refusal::FileTooLarge(size).into());
        }
        let hidden = self.merge.clear(path)?;
        self.give_back(&hidden);
        let mut body = self.writer.begin();
        for segment in segments {
            self.writer.skip_to(&mut body, segment.offset)?;
            let mut left = segment.length;
            while left > 0 {
                let data = reader.data()?.ok_or(Refusal::Truncated)?;
                let now = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.writer.append(&mut body, data.get(..now).unwrap_or(data))?;
                reader.consume(now);
                left -= now as u64;
            }
        }
        let extents = self.writer.end(body)?;
        self.merge.count_bytes(std::mem::size_of_val(&*extents))?;
        Ok(Content::File { size, extents })
    }

    fn give_back(&mut self, hidden: &Hidden) {
        for content in hidden {
            if let Content::File { extents, .. } = content {
                self.writer.give_back(extents);
            }
        }
    }

    fn attributes(&mut self, member: &Member) -> Result<Attributes, Refusal> {
        let mut xattrs = Vec::with_capacity(member.xattrs.len());
        for xattr in &member.xattrs {
            // What the host's overlay mounts and security modules left in an image means nothing in a guest, or harm.
            if xattr.name.starts_with(b"trusted.") || !xattr_storable(&xattr.name) {
                self.xattrs_dropped += 1;
                continue;
            }
            let value = if xattr.name.starts_with(b"system.posix_acl_") {
                acl::stored(&xattr.value)?.into()
            } else {
                xattr.value.clone()
            };
            xattrs.push(Xattr { name: xattr.name.clone(), value });
        }
        if !xattrs_fit(&xattrs) {
            return Err(Refusal::Xattrs);
        }
        let (permissions, uid, gid) = (member.permissions, member.uid, member.gid);
        Ok(Attributes { permissions, uid, gid, modified: member.modified, xattrs })
    }

    fn entry_error(&self, layer: &LayerSource, path: &[u8], trouble: Trouble) -> Error {
        match trouble {
            Trouble::Refused(reason) => entry(layer, path, reason),
            Trouble::Read(error) => refused(layer, path, error),
            Trouble::Written(crate::ext4::Error::Full { .. }) => {
                entry(layer, path, Refusal::Disk(self.limits.disk_bytes))
            }
            Trouble::Written(crate::ext4::Error::Io(source)) => write_error(self.path, source),
        }
    }
}

/// What can go wrong with one entry.
enum Trouble {
    Refused(Refusal),
    Read(tar::Error),
    Written(crate::ext4::Error),
}

impl From<Refusal> for Trouble {
    fn from(reason: Refusal) -> Self {
        Self::Refused(reason)
    }
}

impl From<tar::Error> for Trouble {
    fn from(error: tar::Error) -> Self {
        Self::Read(error)
    }
}

impl From<crate::ext4::Error> for Trouble {
    fn from(error: crate::ext4::Error) -> Self {
        Self::Written(error)
    }
}

pub(super) fn write_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    if crate::disk::is_full(&source) {
        Error::DiskFull { path, source }
    } else {
        Error::Write { path, source }
    }
}

fn entry(layer: &LayerSource, path: &[u8], reason: Refusal) -> Error {
    if path.is_empty() {
        return Error::Layer { layer: layer.digest, reason };
    }
    // A hostile name must not flood whoever prints it.
    let shown = String::from_utf8_lossy(path.get(..256).unwrap_or(path)).into_owned();
    Error::Entry { layer: layer.digest, entry: shown, reason }
}

fn refused(layer: &LayerSource, path: &[u8], error: tar::Error) -> Error {
    match error {
        tar::Error::Io(error) => unpacking(layer, error),
        tar::Error::Refused { path: own, reason } => {
            entry(layer, if own.is_empty() { path } else { &own }, reason)
        }
    }
}

/// The unpacking thread's own error, taken out of its envelope.
fn unpacking(layer: &LayerSource, error: io::Error) -> Error {
    match error.downcast::<Failed>() {
        Ok(Failed(error)) => *error,
        Err(source) => Error::Inflate { layer: layer.digest, source },
    }
}
