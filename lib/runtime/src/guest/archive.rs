//! Copies a directory or a file of the host into a guest as a tar stream, over the lane where there is one.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::{OpenArchive, WriteArchiveInput, write_archive_input};
use imp_protocol::lane;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::pack::{pack, pack_file};
use super::{Error, Lane};
use crate::spec::{CopiedMount, MountAccess};

const CHUNK: usize = 256 << 10;
/// Chunks on their way.
const QUEUE: usize = 4;

/// Copies one mount; returns when all of it is in its place. Without a lane it goes in messages of the call.
pub(crate) async fn copy_in(
    connection: &Connection,
    lane: Option<Lane>,
    mount: &CopiedMount,
) -> Result<(), Error> {
    let failed = |source| Error::Archive { path: mount.source.clone(), source };
    let place = Place::of(mount);
    let mut open = OpenArchive {
        path: Bytes::copy_from_slice(place.directory.as_os_str().as_bytes()),
        uid: None,
        gid: None,
        then_read_only: mount.access == MountAccess::ReadOnly,
        read_only_name: place.name.map(|name| Bytes::copy_from_slice(name.as_bytes())).unwrap_or_default(),
        lane: lane.as_ref().map(|lane| lane.number),
    };
    let what = What { source: mount.source.clone(), name: place.name.map(OsStr::to_owned) };
    let mut files = FilesClient::new(connection.clone());
    let (packed, written) = match lane.map(Lane::into_blocking) {
        Some(Ok((lane, held))) => {
            let end = lane.clone();
            let packing = tokio::task::spawn_blocking(move || over_lane(&what, lane));
            let written = files.write_archive(tokio_stream::iter([opening(open)])).await;
            if written.is_err() {
                // Whoever still writes stops.
                end.hang_up();
            }
            let packed = packing.await;
            drop(held);
            (packed, written)
        }
        lost => {
            if let Some(Err(error)) = lost {
                tracing::warn!(%error, "a mount goes over the channel");
            }
            open.lane = None;
            let (sender, receiver) = mpsc::channel(QUEUE);
            // Room for it: the queue is empty.
            let _ = sender.try_send(opening(open));
            let packing = tokio::task::spawn_blocking(move || {
                what.pack(io::BufWriter::with_capacity(CHUNK, Chunks(sender)))?.flush()
            });
            let written = files.write_archive(ReceiverStream::new(receiver)).await;
            (packing.await, written)
        }
    };
    match (packed.map_err(|error| failed(io::Error::other(error)))?, written) {
        // Cut short, and so the agent says no more than that: it saw an archive without its end.
        (Err(source), _) if source.kind() != io::ErrorKind::BrokenPipe => Err(failed(source)),
        (_, Err(status)) => Err(Error::Refused { call: "WriteArchive", status: Box::new(status) }),
        (Err(source), Ok(_)) => Err(failed(source)),
        (Ok(()), Ok(_)) => Ok(()),
    }
}

fn opening(open: OpenArchive) -> WriteArchiveInput {
    WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) }
}

/// Once the call has taken the lane.
fn over_lane(what: &What, mut lane: lane::Lane) -> io::Result<()> {
    // A lane that ends before the archive does is the call's failure, which says why.
    let broken = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    lane.taken().map_err(broken)?;
    let out = io::BufWriter::with_capacity(CHUNK, lane::Writer::new(lane));
    let chunks = what.pack(out)?.into_inner().map_err(io::IntoInnerError::into_error)?;
    chunks.finish()
}

/// What of the host is packed.
struct What {
    source: PathBuf,
    /// A file's own name; none for a directory.
    name: Option<OsString>,
}

impl What {
    fn pack<W: Write>(&self, out: W) -> io::Result<W> {
        match &self.name {
            None => pack(&self.source, out),
            Some(name) => pack_file(&self.source, Path::new(name), out),
        }
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
