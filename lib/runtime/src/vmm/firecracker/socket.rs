//! Sockets whose names are too long for the kernel, which takes 107 bytes: a jail lies deep below the data directory. They
//! are reached by a handle of the directory that they are in.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let near = Near::to(path)?;
    UnixListener::bind(&near.path)
}

pub(super) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let near = Near::to(path)?;
    UnixStream::connect(&near.path).await
}

/// A short name, as long as it is held.
struct Near {
    path: PathBuf,
    _directory: OwnedFd,
}

impl Near {
    fn to(socket: &Path) -> io::Result<Self> {
        let (Some(directory), Some(name)) = (socket.parent(), socket.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
        Ok(Self { path, _directory: directory })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_socket_is_reached_however_long_its_name_is() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("a".repeat(100)).join("b".repeat(100));
        std::fs::create_dir_all(&deep).unwrap();
        let path = deep.join("v.sock");
        assert_eq!(connect(&path).await.unwrap_err().kind(), io::ErrorKind::NotFound);
        let listener = bind(&path).unwrap();
        assert!(path.exists());
        let mut client = connect(&path).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        client.write_all(b"word").await.unwrap();
        let mut word = [0; 4];
        server.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"word");
    }
}
