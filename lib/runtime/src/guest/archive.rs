//! Copies a directory of the host into a guest as a tar stream.

use std::io::{self, Write};
use std::path::Path;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::{OpenArchive, WriteArchiveInput, write_archive_input};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::Error;
use crate::spec::{CopiedMount, MountAccess};

const CHUNK: usize = 256 << 10;
/// Chunks on their way.
const QUEUE: usize = 4;

/// Copies one mount; returns when all of it is in its place.
pub(crate) async fn copy_in(connection: &Connection, mount: &CopiedMount) -> Result<(), Error> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let open = OpenArchive {
        path: Bytes::copy_from_slice(mount.target.as_slice()),
        uid: None,
        gid: None,
        then_read_only: mount.access == MountAccess::ReadOnly,
    };
    // Room for it: the queue is empty.
    let _ = sender.try_send(WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) });
    let source = mount.source.clone();
    let pack = tokio::task::spawn_blocking(move || pack(&source, sender));
    let mut files = FilesClient::new(connection.clone());
    let written = files.write_archive(ReceiverStream::new(receiver)).await;
    let failed = |source| Error::Archive { path: mount.source.clone(), source };
    let packed = pack.await.map_err(|error| failed(io::Error::other(error)))?;
    match (packed, written) {
        (_, Err(status)) => Err(Error::Refused { call: "WriteArchive", status: Box::new(status) }),
        // Cut short: the agent saw an archive without its end.
        (Err(source), Ok(_)) => Err(failed(source)),
        (Ok(()), Ok(_)) => Ok(()),
    }
}

fn pack(source: &Path, sender: mpsc::Sender<WriteArchiveInput>) -> io::Result<()> {
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(CHUNK, Chunks(sender)));
    archive.follow_symlinks(false);
    archive.append_dir_all(".", source)?;
    archive.into_inner()?.flush()
}

/// Sends what is written to it.
struct Chunks(mpsc::Sender<WriteArchiveInput>);

impl Write for Chunks {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let part = data.get(..data.len().min(CHUNK)).unwrap_or(data);
        let input = Some(write_archive_input::Input::Data(Bytes::copy_from_slice(part)));
        self.0
            .blocking_send(WriteArchiveInput { input })
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
