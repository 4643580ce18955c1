//! What can go wrong with a file, and what the host is told.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tonic::{Code, Status};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{doing} {path}: {source}", path = path.display())]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the archive is damaged or no tar stream: {0}")]
    Archive(#[source] io::Error),
    #[error("the archive's member {0:?} leaves the directory; '..' is not allowed")]
    Leaves(String),
    #[error("the archive's member {0:?} cannot be unpacked: {1}")]
    Member(String, &'static str),
    #[error("`{0}` must be an absolute path without zero bytes")]
    Path(String),
    #[error("{0} is {1}, not a regular file")]
    NotRegular(PathBuf, &'static str),
}

impl Error {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { doing, path, source }
    }

    /// The same for an error of rustix.
    pub(crate) fn errno(doing: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        let path = path.to_owned();
        move |errno| Self::File { doing, path, source: errno.into() }
    }
}

/// The path a host has named.
pub(crate) fn path_of(bytes: &[u8]) -> Result<PathBuf, Error> {
    if bytes.first() == Some(&b'/') && !bytes.contains(&0) {
        Ok(PathBuf::from(OsStr::from_bytes(bytes)))
    } else {
        Err(Error::Path(String::from_utf8_lossy(bytes).chars().take(128).collect()))
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::File { source, .. } => code(source),
            Error::Archive(source) if source.kind() == io::ErrorKind::BrokenPipe => Code::Cancelled,
            Error::Archive(_) | Error::Leaves(_) | Error::Member(..) | Error::Path(_) => {
                Code::InvalidArgument
            }
            Error::NotRegular(..) => Code::FailedPrecondition,
        };
        Self::new(code, error.to_string())
    }
}

fn code(error: &io::Error) -> Code {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => Code::NotFound,
        Some(Errno::EXIST) => Code::AlreadyExists,
        Some(Errno::ACCESS | Errno::PERM) => Code::PermissionDenied,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::FBIG) => {
            Code::ResourceExhausted
        }
        Some(Errno::INVAL | Errno::NAMETOOLONG | Errno::LOOP) => Code::InvalidArgument,
        Some(
            Errno::NOTEMPTY
            | Errno::NOTDIR
            | Errno::ISDIR
            | Errno::XDEV
            | Errno::ROFS
            | Errno::BUSY
            | Errno::TXTBSY
            | Errno::NXIO,
        ) => Code::FailedPrecondition,
        _ => Code::Internal,
    }
}
