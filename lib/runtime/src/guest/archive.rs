//! Copies a directory or a file of the host into a guest as a tar stream.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::{OpenArchive, WriteArchiveInput, write_archive_input};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::Error;
use super::pack::{pack, pack_file};
use crate::spec::{CopiedMount, MountAccess};

const CHUNK: usize = 256 << 10;
/// Chunks on their way.
const QUEUE: usize = 4;

/// Copies one mount; returns when all of it is in its place.
pub(crate) async fn copy_in(connection: &Connection, mount: &CopiedMount) -> Result<(), Error> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let place = Place::of(mount);
    let open = OpenArchive {
        path: Bytes::copy_from_slice(place.directory.as_os_str().as_bytes()),
        uid: None,
        gid: None,
        then_read_only: mount.access == MountAccess::ReadOnly,
        read_only_name: place.name.map(|name| Bytes::copy_from_slice(name.as_bytes())).unwrap_or_default(),
        lane: None,
    };
    // Room for it: the queue is empty.
    let _ = sender.try_send(WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) });
    let (source, name) = (mount.source.clone(), place.name.map(OsStr::to_owned));
    let packing = tokio::task::spawn_blocking(move || {
        let out = io::BufWriter::with_capacity(CHUNK, Chunks(sender));
        match name {
            None => pack(&source, out)?.flush(),
            Some(name) => pack_file(&source, Path::new(&name), out)?.flush(),
        }
    });
    let mut files = FilesClient::new(connection.clone());
    let written = files.write_archive(ReceiverStream::new(receiver)).await;
    let failed = |source| Error::Archive { path: mount.source.clone(), source };
    let packed = packing.await.map_err(|error| failed(io::Error::other(error)))?;
    match (packed, written) {
        // Cut short, and so the agent says no more than that: it saw an archive without its end.
        (Err(source), _) if source.kind() != io::ErrorKind::BrokenPipe => Err(failed(source)),
        (_, Err(status)) => Err(Error::Refused { call: "WriteArchive", status: Box::new(status) }),
        (Err(source), Ok(_)) => Err(failed(source)),
        (Ok(()), Ok(_)) => Ok(()),
    }
}

/// Where in the guest a mount's archive is unpacked.
struct Place<'a> {
    directory: &'a Path,
    /// A file's own name; none for a directory.
    name: Option<&'a OsStr>,
}

impl<'a> Place<'a> {
    fn of(mount: &'a CopiedMount) -> Self {
        let target = Path::new(OsStr::from_bytes(mount.target.as_slice()));
        match (target.parent(), target.file_name()) {
            (Some(directory), Some(name)) if !mount.source.is_dir() => Self { directory, name: Some(name) },
            _ => Self { directory: target, name: None },
        }
    }
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
