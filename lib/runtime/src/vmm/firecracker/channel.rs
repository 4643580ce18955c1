//! The channel to a guest over Firecracker's hybrid vsock: docs/vsock.md of Firecracker.
//!
//! A guest that has booted knocks: it connects to a port of its host, which Firecracker turns into a connection to a
//! socket beside its own. Asking the guest again and again would take the processor that it boots with. Whatever a guest
//! sends there is not read; after the first knock nobody listens any more.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::socket;

/// Longest answer to CONNECT: "OK ", a port, an end of line.
const LONGEST_ANSWER: usize = 16;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot listen on {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the guest refused a connection")]
    Refused,
    #[error("the guest did not answer within {} ms", patience.as_millis())]
    Silent { patience: Duration },
    #[error("Firecracker answered {answer:?} instead of OK")]
    NotOk { answer: String },
}

/// Somebody who waits for the guest's first sign.
pub(super) struct Knock {
    heard: watch::Receiver<()>,
    _task: AbortOnDropHandle<()>,
}

impl Knock {
    /// Listens from now on. A socket that is left there is removed: its owner is known to be gone.
    pub(super) fn listen(path: &Path) -> Result<Self, Error> {
        let listen = |source| Error::Listen { path: path.to_owned(), source };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(listen(error)),
            _ => {}
        }
        let listener = socket::bind(path).map_err(listen)?;
        let (sender, heard) = watch::channel(());
        let path = path.to_owned();
        let task = tokio::spawn(async move {
            let knocked = listener.accept().await;
            drop(listener);
            if let Err(error) = fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "a socket is left until its VM ends");
            }
            if let Err(error) = knocked {
                tracing::warn!(%error, "a guest's knock was not heard; it is asked instead");
            }
            drop(sender);
        });
        Ok(Self { heard, _task: AbortOnDropHandle::new(task) })
    }

    /// Returns once the guest has knocked, and from then on at once.
    pub(super) async fn heard(&self) {
        let mut heard = self.heard.clone();
        while heard.changed().await.is_ok() {}
    }
}

/// A stream to this port of the guest. Somebody in the guest must listen there; `patience` is for the guest's kernel.
pub(super) async fn connect(vsock: &Path, port: u32, patience: Duration) -> Result<UnixStream, Error> {
    let connect = |source| Error::Connect { path: vsock.to_owned(), source };
    let mut stream = socket::connect(vsock).await.map_err(connect)?;
    let asked = async {
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).await.map_err(|_| Error::Refused)?;
        answer(&mut stream).await
    };
    timeout(patience, asked).await.map_err(|_| Error::Silent { patience })??;
    Ok(stream)
}

/// Byte by byte: what stands behind the line is the guest's.
async fn answer(stream: &mut UnixStream) -> Result<(), Error> {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") && line.len() < LONGEST_ANSWER {
        match stream.read_u8().await {
            Ok(byte) => line.push(byte),
            // Firecracker closes the connection to a port at which nobody listens, and so does a reset after a restore.
            Err(_) => return Err(Error::Refused),
        }
    }
    let number = line.strip_prefix(b"OK ").and_then(|rest| rest.strip_suffix(b"\n"));
    match number {
        Some(number) if number.iter().all(u8::is_ascii_digit) => Ok(()),
        Some(_) | None => Err(Error::NotOk { answer: String::from_utf8_lossy(&line).into_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// A Firecracker that answers a CONNECT with this and goes on with "guest".
    fn firecracker(answer: &'static [u8]) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = vec![0; 14];
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, b"CONNECT 10000\n");
            stream.write_all(answer).await.unwrap();
        });
        (directory, path)
    }

    #[tokio::test]
    async fn what_the_guest_says_right_after_the_answer_is_not_lost() {
        let (_directory, path) = firecracker(b"OK 1073741824\nguest");
        let mut stream = connect(&path, 10_000, PATIENCE).await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "guest");
    }

    #[tokio::test]
    async fn a_refusal_nonsense_and_silence_are_told_apart() {
        let (_directory, path) = firecracker(b"");
        assert!(matches!(connect(&path, 10_000, PATIENCE).await, Err(Error::Refused)));
        for nonsense in [&b"OK no\n"[..], b"NO 1\n", b"OK 1111111111111111111111111111111111"] {
            let (_directory, path) = firecracker(nonsense);
            let error = connect(&path, 10_000, PATIENCE).await.unwrap_err();
            assert!(matches!(error, Error::NotOk { .. }), "{error}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(connect(&path, 1, Duration::ZERO).await, Err(Error::Silent { .. })));
        let none = directory.path().join("none");
        assert!(matches!(connect(&none, 1, PATIENCE).await, Err(Error::Connect { .. })));
    }

    #[tokio::test]
    async fn a_knock_is_heard_once_and_nobody_listens_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock_10000");
        drop(UnixListener::bind(&path).unwrap());
        let knock = Knock::listen(&path).unwrap();
        // Whatever is ready by then has had its turn.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(timeout(Duration::ZERO, knock.heard()).await.is_err());
        // A guest that floods instead of knocking.
        let mut guest = UnixStream::connect(&path).await.unwrap();
        timeout(PATIENCE, knock.heard()).await.unwrap();
        while guest.write_all(&[0; 4096]).await.is_ok() {}
        assert!(UnixStream::connect(&path).await.is_err() && !path.exists());
        timeout(PATIENCE, knock.heard()).await.unwrap();
    }
}
