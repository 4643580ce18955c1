//! Snapshots of a QEMU machine: it migrates into a socket of this process, and machines that are made of it from one.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::args::MEMORY;
use super::qmp::{self, Qmp};
use super::stream;
use crate::vmm::snapshot::SnapshotFiles;

/// How long a machine's state may take, besides its memory.
const TRANSFER: Duration = Duration::from_secs(60);
/// Bytes of memory that go through in a second on a slow machine.
const SLOWEST: u64 = 32 << 20;
/// A QEMU that has sent nothing for so long is stuck.
const SILENCE: Duration = Duration::from_secs(20);
/// Of a second: as fast as it goes.
const BANDWIDTH: u64 = 1 << 40;

/// What a state begins with; what follows is a digest and the stream that it is of.
const MAGIC: &[u8; 8] = b"IMPQEMU1";
const DIGEST: usize = 32;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Monitor(#[from] qmp::Error),
    #[error("QEMU did not connect to {}", path.display())]
    Accept {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Stream(#[from] stream::Error),
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("QEMU did not write its state: {status}")]
    NotSaved { status: String },
    #[error("reading what QEMU wrote was ended")]
    Ended,
}

/// Writes memory and state of a machine that is paused. QEMU does so once between two pauses.
pub(super) async fn save(
    qmp: &Qmp,
    socket: &Path,
    memory_size: u64,
    to: &SnapshotFiles,
) -> Result<(), Error> {
    let written = transfer(qmp, socket, memory_size, to).await;
    // Whatever became of it: nobody talks over it any more.
    let _ = fs::remove_file(socket);
    written
}

async fn transfer(qmp: &Qmp, socket: &Path, memory_size: u64, to: &SnapshotFiles) -> Result<(), Error> {
    let accept = |source| Error::Accept { path: socket.to_owned(), source };
    clear(socket).map_err(accept)?;
    let listener = UnixListener::bind(socket).map_err(accept)?;
    prepare(qmp).await?;
    let mut outcome = qmp.migration();
    qmp.execute_with("migrate", json!({"uri": uri(socket)})).await?;
    let accepted =
        timeout(SILENCE, listener.accept()).await.map_err(|_| accept(io::ErrorKind::TimedOut.into()))?;
    let stream = accepted.and_then(|(stream, _)| stream.into_std()).map_err(accept)?;
    let to = to.clone();
    let reader = tokio::task::spawn_blocking(move || receive(stream, memory_size, &to));
    let received = reader.await.map_err(|_| Error::Ended)?;
    // QEMU says how it ended also when nobody listened to it any more.
    let status = outcome.ended("migrate", TRANSFER).await?;
    received?;
    if status == qmp::Migration::Completed {
        Ok(())
    } else {
        Err(Error::NotSaved { status: format!("{status:?}") })
    }
}

fn receive(stream: std::os::unix::net::UnixStream, size: u64, to: &SnapshotFiles) -> Result<(), Error> {
    let set = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(SILENCE)));
    set.map_err(stream::Error::Read)?;
    let write = |path: &Path, source| Error::Write { path: path.to_owned(), source };
    let memory = File::create_new(&to.memory).map_err(|source| write(&to.memory, source))?;
    let stream = Until { stream, deadline: Instant::now() + TRANSFER + Duration::from_secs(size / SLOWEST) };
    let rest = stream::split(BufReader::with_capacity(1 << 18, stream), MEMORY, size, &memory)?;
    fs::write(&to.state, sealed(&rest)).map_err(|source| write(&to.state, source))
}

/// A stream that is read until then: a QEMU that was taken over by its guest may send without end.
struct Until<R> {
    stream: R,
    deadline: Instant,
}

impl<R: Read> Read for Until<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if Instant::now() < self.deadline {
            self.stream.read(buffer)
        } else {
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

/// Loads a machine that waits for its state, which leaves it paused.
pub(super) async fn load(qmp: &Qmp, socket: &Path, state: &[u8]) -> Result<(), qmp::Error> {
    let loaded = feed(qmp, socket, state).await;
    let _ = fs::remove_file(socket);
    loaded
}

async fn feed(qmp: &Qmp, socket: &Path, state: &[u8]) -> Result<(), qmp::Error> {
    clear(socket)?;
    prepare(qmp).await?;
    let mut outcome = qmp.migration();
    qmp.execute_with("migrate-incoming", json!({"uri": uri(socket)})).await?;
    let sent = async {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(state).await?;
        stream.shutdown().await
    };
    // A QEMU that does not like it hangs up, and says why elsewhere.
    if let Err(error) =
        timeout(TRANSFER, sent).await.map_err(|_| qmp::Error::Late { command: "migrate-incoming" })?
    {
        tracing::debug!(%error, "a state was not read to its end");
    }
    match outcome.ended("migrate-incoming", TRANSFER).await? {
        qmp::Migration::Completed => Ok(()),
        qmp::Migration::Failed => Err(qmp::Error::Closed { command: "migrate-incoming" }),
    }
}

async fn prepare(qmp: &Qmp) -> Result<(), qmp::Error> {
    let events = json!({"capabilities": [{"capability": "events", "state": true}]});
    qmp.execute_with("migrate-set-capabilities", events).await?;
    qmp.execute_with("migrate-set-parameters", json!({"max-bandwidth": BANDWIDTH})).await?;
    Ok(())
}

fn clear(socket: &Path) -> io::Result<()> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn uri(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

fn sealed(stream: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&Sha256::digest(stream));
    bytes.extend_from_slice(stream);
    bytes
}

/// Why a snapshot is none that a machine of this memory can be made of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not the state of a QEMU machine", path.display())]
    Foreign { path: PathBuf },
    #[error("{} is damaged: its digest is another", path.display())]
    Damaged { path: PathBuf },
    #[error("{} holds {there} bytes of memory, and the machine has {expected}", path.display())]
    Memory { path: PathBuf, there: u64, expected: u64 },
    #[error(
        "{} must be writable for the user of QEMU, which opens it so without ever writing to it",
        path.display()
    )]
    NotWritable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The stream of a snapshot that is whole.
pub(super) fn read(files: &SnapshotFiles, memory_size: u64) -> Result<Vec<u8>, Fault> {
    let path = &files.memory;
    let there = fs::metadata(path).map_err(|source| Fault::Read { path: path.clone(), source })?.len();
    if there != memory_size {
        return Err(Fault::Memory { path: path.clone(), there, expected: memory_size });
    }
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|source| Fault::NotWritable { path: path.clone(), source })?;
    let path = &files.state;
    let read = |source| Fault::Read { path: path.clone(), source };
    let length = fs::metadata(path).map_err(read)?.len();
    if length > stream::LARGEST_REST + 4096 {
        return Err(Fault::Foreign { path: path.clone() });
    }
    let mut bytes = fs::read(path).map_err(read)?;
    let head = MAGIC.len() + DIGEST;
    if !bytes.starts_with(MAGIC) || bytes.len() < head {
        return Err(Fault::Foreign { path: path.clone() });
    }
    let stream = bytes.split_off(head);
    if bytes.get(MAGIC.len()..) != Some(Sha256::digest(&stream).as_slice()) {
        return Err(Fault::Damaged { path: path.clone() });
    }
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_is_damaged_cut_or_another_s_is_told_apart_from_a_whole_one() {
        let directory = tempfile::tempdir().unwrap();
        let files =
            SnapshotFiles { state: directory.path().join("state"), memory: directory.path().join("memory") };
        let put = |state: &[u8], memory: &[u8]| {
            fs::write(&files.state, state).unwrap();
            fs::write(&files.memory, memory).unwrap();
        };
        let (whole, memory) = (sealed(b"devices"), [0; 4096]);
        put(&whole, &memory);
        assert_eq!(read(&files, 4096).unwrap(), b"devices");
        assert!(matches!(read(&files, 8192), Err(Fault::Memory { there: 4096, expected: 8192, .. })));
        let mut damaged = whole.clone();
        damaged[MAGIC.len() + DIGEST] ^= 1;
        for state in [damaged.as_slice(), &whole[..whole.len() - 1]] {
            put(state, &memory);
            assert!(matches!(read(&files, 4096), Err(Fault::Damaged { .. })));
        }
        for state in [&b"QEVM\0\0\0\x03"[..], b"", &whole[..20]] {
            put(state, &memory);
            assert!(matches!(read(&files, 4096), Err(Fault::Foreign { .. })));
        }
    }

    #[test]
    fn the_cause_of_a_fault_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let files =
            SnapshotFiles { state: directory.path().join("state"), memory: directory.path().join("memory") };
        let fault = crate::vmm::NotLoaded::from(read(&files, 4096).unwrap_err());
        let told = crate::vm::chain(&crate::vmm::Error::NotLoaded(fault));
        assert_eq!(told.matches("No such file").count(), 1, "{told}");
    }
}
