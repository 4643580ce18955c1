//! Trees of files as tar streams, in and out.

mod header;
mod member;
mod pack;
mod unpack;

use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use imp_protocol::guest::write_archive_input::Input;
use imp_protocol::guest::{
    FileChunk, OpenArchive, ReadArchiveRequest, WriteArchiveInput, WriteArchiveResponse,
};
use imp_protocol::lane;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use self::pack::Output;
use self::unpack::{Owner, Unpacked};
use crate::agent::Agent;
use crate::files::{self, CHUNK, Error, WAITING_CHUNKS, path_of};
use crate::lane::Taken;

/// Bytes after the end of an archive that are read and passed over.
const MOST_PADDING: u64 = 1 << 20;
/// Bytes of a lane that are read before they are wanted: headers are short. Content passes this buffer by.
const READ_AHEAD: usize = 8 << 10;

pub(crate) async fn serve_read(
    agent: &Arc<Agent>,
    request: ReadArchiveRequest,
) -> Result<Response<ReceiverStream<Result<FileChunk, Status>>>, Status> {
    let path = path_of(&request.path)?;
    // Looked at before the answer starts, so that a wrong path is an error of the call.
    let path = files::work(move || {
        let resolved = if request.follow_link {
            fs::canonicalize(&path)
        } else {
            fs::symlink_metadata(&path).map(|_| path.clone())
        };
        resolved.map_err(Error::file("cannot archive", &path))
    })
    .await?;
    let (chunks, stream) = mpsc::channel(WAITING_CHUNKS);
    let agent = Arc::clone(agent);
    tokio::spawn(async move {
        let Ok(_permit) = agent.archives().acquire().await else { return };
        let call = chunks.clone();
        let lane = request.lane.map(|number| agent.lane().take(number, move || !call.is_closed()));
        let packed = match lane.transpose() {
            Ok(lane) => {
                let chunks = chunks.clone();
                files::work(move || {
                    let lane = lane.map(Taken::begin).transpose().map_err(Error::Archive)?;
                    let mut output = ToHost { chunks, lane: lane.map(lane::Writer::new), buffer: Vec::new() };
                    pack::pack(&path, name_of(&path), &mut output)?;
                    output.finish().map_err(Error::Archive)
                })
                .await
            }
            Err(refused) => Err(refused),
        };
        if let Err(status) = packed {
            let _ = chunks.send(Err(status)).await;
        }
    });
    Ok(Response::new(ReceiverStream::new(stream)))
}

pub(crate) async fn serve_write(
    agent: &Arc<Agent>,
    open: OpenArchive,
    mut inputs: Streaming<WriteArchiveInput>,
) -> Result<Response<WriteArchiveResponse>, Status> {
    let path = path_of(&open.path)?;
    let owner = Owner { uid: open.uid, gid: open.gid };
    let _permit = agent.archives().acquire().await;
    // Dropped with this call, also when the host has broken it off.
    let (wanted, _call) = {
        let call = Arc::new(());
        (Arc::downgrade(&call), call)
    };
    let goes_on = move || wanted.strong_count() > 0;
    let lane = open.lane.map(|number| agent.lane().take(number, goes_on.clone())).transpose()?;
    let (chunks, waiting) = mpsc::channel(WAITING_CHUNKS);
    let unpacking = files::work(move || {
        let mut from_host: Box<dyn Read> = match lane {
            Some(lane) => {
                let lane = lane.begin().map_err(Error::Archive)?;
                Box::new(lane::Reader::new(BufReader::with_capacity(READ_AHEAD, lane)))
            }
            None => Box::new(FromHost { waiting, current: Bytes::new() }),
        };
        let unpacked = unpack_all(&path, owner, &mut from_host, &goes_on)?;
        if open.then_read_only {
            make_read_only(&read_only_part(&path, &open.read_only_name)?)?;
        }
        Ok(unpacked)
    });
    let receiving = async move {
        loop {
            let chunk = match inputs.message().await {
                Ok(Some(message)) => match message.input {
                    Some(Input::Data(bytes)) => Ok(bytes),
                    Some(Input::Open(_)) | None => Err(io::ErrorKind::InvalidInput.into()),
                },
                Ok(None) => return,
                // What is unpacked so far stays, but the caller is never told that it is whole.
                Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
            };
            let last = chunk.is_err();
            if chunks.send(chunk).await.is_err() || last {
                return;
            }
        }
    };
    let (unpacked, ()) = tokio::join!(unpacking, receiving);
    let unpacked = unpacked?;
    Ok(Response::new(WriteArchiveResponse { entries: unpacked.entries, bytes: unpacked.bytes }))
}

fn unpack_all(
    path: &Path,
    owner: Owner,
    mut reader: impl Read,
    goes_on: &dyn Fn() -> bool,
) -> Result<Unpacked, Error> {
    let unpacked = unpack::unpack(path, owner, &mut reader, goes_on)?;
    io::copy(&mut reader.take(MOST_PADDING), &mut io::sink()).map_err(Error::Archive)?;
    Ok(unpacked)
}

fn read_only_part(directory: &Path, name: &[u8]) -> Result<PathBuf, Error> {
    use std::os::unix::ffi::OsStrExt;
    if name.contains(&b'/') || matches!(name, b"." | b"..") {
        return Err(Error::Archive(io::ErrorKind::InvalidInput.into()));
    }
    Ok(if name.is_empty() { directory.to_owned() } else { directory.join(std::ffi::OsStr::from_bytes(name)) })
}

/// A bind mount of the path over itself, which processes in the guest cannot write to without undoing it first.
fn make_read_only(path: &Path) -> Result<(), Error> {
    use rustix::mount::{MountFlags, mount_bind, mount_remount};
    let failed = || Error::errno("cannot make read-only", path);
    mount_bind(path, path).map_err(failed())?;
    mount_remount(path, MountFlags::BIND | MountFlags::RDONLY, c"").map_err(failed())
}

/// Copies a file or a tree to a name that is not taken, with owners, modes, times, links and extended attributes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(from).map_err(Error::file("cannot copy", from))?;
    if metadata.is_dir() {
        fs::create_dir(to).map_err(Error::file("cannot create", to))?;
        return copy_directory(from, to);
    }
    let parent = to.parent().unwrap_or(Path::new("/"));
    through_a_pipe(from, name_of(to), parent)
}

/// Copies what is in a directory, and the directory's own owner and mode, to another directory.
pub(crate) fn copy_directory(from: &Path, to: &Path) -> Result<(), Error> {
    through_a_pipe(from, &[], to)?;
    let copied = fs::metadata(from).and_then(|metadata| {
        chown(to, Some(metadata.uid()), Some(metadata.gid()))?;
        fs::set_permissions(to, fs::Permissions::from_mode(metadata.mode() & 0o7777))
    });
    copied.map_err(Error::file("cannot copy to", to))
}

fn through_a_pipe(from: &Path, name: &[u8], directory: &Path) -> Result<(), Error> {
    let (reader, mut writer) = io::pipe().map_err(Error::file("cannot copy", from))?;
    std::thread::scope(|scope| {
        let packing = scope.spawn(move || pack::pack(from, name, &mut writer));
        let unpacked = unpack_all(directory, Owner::default(), reader, &|| true);
        let packed = packing.join().unwrap_or_else(|_| Err(Error::Archive(io::ErrorKind::Other.into())));
        // A packer that failed leaves a torn stream; its reason is the one that says something.
        packed.and(unpacked.map(drop))
    })
}

fn name_of(path: &Path) -> &[u8] {
    use std::os::unix::ffi::OsStrExt;
    path.file_name().map(OsStrExt::as_bytes).unwrap_or_default()
}

/// The host's end of an archive that is packed.
struct ToHost {
    /// Messages of the call: what is left out, and the archive itself when it has no lane.
    chunks: mpsc::Sender<Result<FileChunk, Status>>,
    lane: Option<lane::Writer<Taken>>,
    buffer: Vec<u8>,
}

impl ToHost {
    fn send(&mut self, data: Bytes) -> io::Result<()> {
        if let Some(lane) = &mut self.lane {
            return lane.write_all(&data);
        }
        self.chunks
            .blocking_send(Ok(FileChunk { data, ..Default::default() }))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl ToHost {
    fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        self.lane.map_or(Ok(()), lane::Writer::finish)
    }
}

impl Write for ToHost {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let data = std::mem::take(&mut self.buffer);
        if data.is_empty() { Ok(()) } else { self.send(data.into()) }
    }
}

impl Output for ToHost {
    fn give(&mut self, piece: Bytes) -> io::Result<()> {
        if self.lane.is_some() && piece.len() >= CHUNK / 4 {
            self.flush()?;
            return self.send(piece);
        }
        for chunk in files::chunks(piece) {
            // Small files share messages; a large chunk goes as it is.
            if chunk.len() < CHUNK / 4 {
                self.write_all(&chunk)?;
            } else {
                self.flush()?;
                self.send(chunk)?;
            }
        }
        Ok(())
    }

    fn leave_out(&mut self, name: &[u8]) -> io::Result<()> {
        let chunk = FileChunk { left_out: vec![Bytes::copy_from_slice(name)], ..Default::default() };
        self.chunks.blocking_send(Ok(chunk)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Output for io::PipeWriter {
    fn give(&mut self, piece: Bytes) -> io::Result<()> {
        self.write_all(&piece)
    }

    /// Whoever listened on a socket does not listen on its copy.
    fn leave_out(&mut self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// The host's end of an archive that is unpacked.
struct FromHost {
    waiting: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for FromHost {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.waiting.blocking_recv() {
                Some(chunk) => self.current = chunk?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.current.len());
        self.current.split_to(count).copy_to_slice(buffer.get_mut(..count).unwrap_or_default());
        Ok(count)
    }
}

/// Where a member or a directory is, for messages.
fn shown(path: &Path, name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    path.join(std::ffi::OsStr::from_bytes(name))
}
