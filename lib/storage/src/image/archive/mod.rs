//! Images in files: OCI image layouts, and tars of them or of `docker save`. Nothing is unpacked: blobs are read where
//! they are and go, verified, into the store.

mod docker;
mod files;
mod layout;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

pub(crate) use files::Files;

use crate::blob::digest::Digest;
use crate::blob::{self, BlobStore, Partial};
use crate::image::manifest::{self, Descriptor, Manifest};
use crate::image::platform::Platform;
use crate::image::reference::{Archive, ArchiveFormat, Reference};
use crate::progress::{Event, Progress};

/// Bytes between two reports of progress, and of one read.
const REPORT_EVERY: u64 = 4 << 20;
const READ_SIZE: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Blob(#[from] blob::Error),
    #[error("cannot open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not a tar archive, or a damaged one")]
    Tar {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} has more than {limit} entries")]
    Entries { path: PathBuf, limit: usize },
    #[error("{path} is larger than {limit} bytes when decompressed")]
    Bomb { path: PathBuf, limit: u64 },
    #[error("{path} has no {file}: it is not what {format} means")]
    NotThisFormat { path: PathBuf, file: &'static str, format: &'static str },
    #[error("{path} does not have the file {file}")]
    MissingFile { path: PathBuf, file: String },
    #[error("{file} of {path} has more than {limit} bytes")]
    TooLarge { path: PathBuf, file: String, limit: u64 },
    #[error("{file} of {path} is not valid JSON of the expected form")]
    Json {
        path: PathBuf,
        file: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{path} has no image {name:?}; it has: {}", .available.join(", "))]
    NoSuchName { path: PathBuf, name: String, available: Vec<String> },
    #[error("{path} has no image")]
    Empty { path: PathBuf },
    #[error("{path}: the manifest {digest} has other content than its digest says")]
    WrongManifest { path: PathBuf, digest: Digest },
    #[error("{path}: the image cannot be used")]
    Manifest {
        path: PathBuf,
        #[source]
        source: manifest::Error,
    },
    #[error("{path}: the configuration of the image cannot be used")]
    Config {
        path: PathBuf,
        #[source]
        source: crate::image::config::Error,
    },
}

/// An archive that can be read.
#[derive(Debug)]
pub(crate) struct Opened {
    files: Files,
    format: ArchiveFormat,
    name: Option<String>,
}

/// One image of an archive.
#[derive(Debug)]
pub(crate) struct ArchivedImage {
    pub(crate) names: Vec<Reference>,
    /// What the archive names: the image, or an index that leads to it.
    pub(crate) target: Digest,
    /// The manifest, byte for byte.
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
    /// Where its blobs are, in the order of config and layers.
    files: Vec<(Digest, String)>,
}

impl Opened {
    /// `temporary` is a directory for what a compressed archive becomes.
    pub(crate) fn open(archive: &Archive, temporary: &Path) -> Result<Self, Error> {
        let files = match archive.format {
            ArchiveFormat::OciLayout => Files::directory(&archive.path)?,
            ArchiveFormat::OciArchive | ArchiveFormat::DockerArchive => Files::tar(&archive.path, temporary)?,
        };
        Ok(Self { files, format: archive.format, name: archive.name.clone() })
    }

    /// The images that are asked for.
    pub(crate) fn images(&self, platform: &Platform) -> Result<Vec<ArchivedImage>, Error> {
        let name = self.name.as_deref();
        let images = match self.format {
            ArchiveFormat::OciLayout | ArchiveFormat::OciArchive => {
                layout::images(&self.files, self.format, name, platform)?
            }
            ArchiveFormat::DockerArchive if self.files.has(docker::MANIFEST) => {
                docker::images(&self.files, name)?
            }
            ArchiveFormat::DockerArchive if self.files.has(layout::INDEX) => {
                layout::images(&self.files, self.format, name, platform)?
            }
            ArchiveFormat::DockerArchive => {
                let (path, format) = (self.files.path().to_owned(), self.format.prefix());
                return Err(Error::NotThisFormat { path, file: docker::MANIFEST, format });
            }
        };
        if images.is_empty() { Err(Error::Empty { path: self.files.path().to_owned() }) } else { Ok(images) }
    }

    /// Makes sure that a blob of an image is in the store.
    pub(crate) fn copy_blob(
        &self,
        image: &ArchivedImage,
        blob: &Descriptor,
        store: &BlobStore,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let Some(mut partial) = Partial::wait(store, &blob.digest, blob.size)? else {
            progress.report(Event::Present { blob: blob.digest });
            return Ok(());
        };
        let file =
            image.files.iter().find(|(digest, _)| *digest == blob.digest).map(|(_, file)| file.as_str());
        let (mut reader, _) = self.files.open(file.unwrap_or_default())?;
        let mut buffer = vec![0; READ_SIZE];
        let mut reported = 0;
        loop {
            let path = self.files.path();
            let count =
                reader.read(&mut buffer).map_err(|source| Error::Read { path: path.to_owned(), source })?;
            if count == 0 {
                break;
            }
            partial.write(buffer.get(..count).unwrap_or_default())?;
            if partial.written() >= reported + REPORT_EVERY || partial.written() == blob.size {
                reported = partial.written();
                progress.report(Event::Transferred { blob: blob.digest, bytes: reported, total: blob.size });
            }
        }
        partial.finish()?;
        progress.report(Event::Verified { blob: blob.digest });
        Ok(())
    }
}

#[cfg(test)]
#[path = "archive_tests.rs"]
mod tests;
