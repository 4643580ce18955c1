//! One layer: a tar of entries in the order in which they are added, compressed in one of the ways that images use.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use tar::{EntryType, Header};

/// Modification time of entries, so that the same layer has the same digest every time.
pub const TIME: u64 = 1_700_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    None,
    #[default]
    Gzip,
    /// Gzip in several members, as parallel compressors write it.
    GzipMembers,
    Zstd,
}

impl Compression {
    /// Media type of a layer in an OCI manifest.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::None => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip | Self::GzipMembers => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }

    /// Writes `tar` to `to` in this form.
    pub(super) fn write(self, mut tar: impl Read, to: impl Write) -> io::Result<()> {
        match self {
            Self::None => copy(&mut tar, to),
            Self::Gzip => {
                let mut gzip = flate2::write::GzEncoder::new(to, flate2::Compression::fast());
                io::copy(&mut tar, &mut gzip)?;
                gzip.finish()?.flush()
            }
            Self::GzipMembers => write_members(tar, to),
            Self::Zstd => {
                let mut zstd = zstd::Encoder::new(to, 1)?;
                io::copy(&mut tar, &mut zstd)?;
                zstd.finish()?.flush()
            }
        }
    }
}

fn copy(from: &mut impl Read, mut to: impl Write) -> io::Result<()> {
    io::copy(from, &mut to)?;
    to.flush()
}

fn write_members(mut tar: impl Read, mut to: impl Write) -> io::Result<()> {
    const MEMBER: u64 = 64 << 10;
    loop {
        let mut part = Vec::new();
        tar.by_ref().take(MEMBER).read_to_end(&mut part)?;
        if part.is_empty() {
            return to.flush();
        }
        let mut gzip = flate2::write::GzEncoder::new(&mut to, flate2::Compression::fast());
        gzip.write_all(&part)?;
        gzip.finish()?;
    }
}

enum Source {
    Entries(Box<tar::Builder<Vec<u8>>>),
    Bytes(Vec<u8>),
    File(PathBuf),
}

/// A layer being built. Paths are as they stand in the tar, usually without a leading slash.
pub struct Layer {
    source: Source,
    pub(super) compression: Compression,
    pub(super) media_type: Option<String>,
}

impl Default for Layer {
    fn default() -> Self {
        Self::new()
    }
}

impl Layer {
    pub fn new() -> Self {
        Self::from_source(Source::Entries(Box::new(tar::Builder::new(Vec::new()))))
    }

    /// A layer whose tar is given, well-formed or not.
    pub fn from_tar(tar: Vec<u8>) -> Self {
        Self::from_source(Source::Bytes(tar))
    }

    /// A layer whose tar is a file, which is read when the image is written.
    pub fn from_tar_file(path: impl Into<PathBuf>) -> Self {
        Self::from_source(Source::File(path.into()))
    }

    fn from_source(source: Source) -> Self {
        Self { source, compression: Compression::default(), media_type: None }
    }

    pub fn compressed(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// A media type other than the one that belongs to the compression.
    pub fn media_type(mut self, media_type: &str) -> Self {
        self.media_type = Some(media_type.to_owned());
        self
    }

    pub fn file(self, path: &str, mode: u32, content: &[u8]) -> Self {
        self.entry(path, EntryType::Regular, |header| header.set_mode(mode), content)
    }

    pub fn directory(self, path: &str, mode: u32) -> Self {
        self.entry(path, EntryType::Directory, |header| header.set_mode(mode), &[])
    }

    /// The target is kept verbatim, dots and leading slashes included.
    pub fn symlink(mut self, path: &str, target: &str) -> Self {
        let mut header = header(EntryType::Symlink, 0o777);
        self.builder().append_link(&mut header, path, target).expect("a tar in memory takes every link");
        self
    }

    pub fn hard_link(mut self, path: &str, target: &str) -> Self {
        let mut header = header(EntryType::Link, 0o644);
        self.builder().append_link(&mut header, path, target).expect("a tar in memory takes every link");
        self
    }

    /// Removes `path` of the layers below.
    pub fn whiteout(self, path: &str) -> Self {
        let (parent, name) = path.rsplit_once('/').map_or(("", path), |(parent, name)| (parent, name));
        let slash = if parent.is_empty() { "" } else { "/" };
        self.file(&format!("{parent}{slash}.wh.{name}"), 0o644, &[])
    }

    /// Hides what the layers below have in `directory`.
    pub fn opaque(self, directory: &str) -> Self {
        self.file(&format!("{directory}/.wh..wh..opq"), 0o644, &[])
    }

    /// Any entry: `change` edits the header (mode 0644, owner 0:0, [`TIME`]) before its checksum is made.
    pub fn entry(
        mut self,
        path: &str,
        kind: EntryType,
        change: impl FnOnce(&mut Header),
        content: &[u8],
    ) -> Self {
        let mut header = header(kind, 0o644);
        header.set_size(content.len() as u64);
        change(&mut header);
        self.builder().append_data(&mut header, path, content).expect("a tar in memory takes every entry");
        self
    }

    /// PAX records for the entry that is added next, e.g. `("SCHILY.xattr.user.mime", b"text/plain")`.
    pub fn pax(mut self, records: &[(&str, &[u8])]) -> Self {
        self.builder()
            .append_pax_extensions(records.iter().copied())
            .expect("a tar in memory takes every record");
        self
    }

    #[expect(clippy::panic, reason = "a fixture that contradicts itself is a mistake in the test")]
    fn builder(&mut self) -> &mut tar::Builder<Vec<u8>> {
        match &mut self.source {
            Source::Entries(builder) => builder,
            Source::Bytes(_) | Source::File(_) => {
                panic!("entries are added to a layer made by Layer::new(), not to one whose tar is given")
            }
        }
    }

    /// The finished tar, uncompressed.
    pub(super) fn open(self) -> anyhow::Result<Tar> {
        Ok(match self.source {
            Source::Entries(builder) => Tar::Memory(Cursor::new(builder.into_inner()?)),
            Source::Bytes(bytes) => Tar::Memory(Cursor::new(bytes)),
            Source::File(path) => {
                Tar::Disk(File::open(&path).with_context(|| format!("opening the layer {}", path.display()))?)
            }
        })
    }
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(TIME);
    header.set_size(0);
    header
}

/// An uncompressed tar that can be read twice: for its own digest and into its blob.
pub(super) enum Tar {
    Memory(Cursor<Vec<u8>>),
    Disk(File),
}

impl Read for Tar {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Memory(bytes) => bytes.read(buffer),
            Self::Disk(file) => file.read(buffer),
        }
    }
}

impl Seek for Tar {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::Memory(bytes) => bytes.seek(to),
            Self::Disk(file) => file.seek(to),
        }
    }
}
