//! Archives on their way between a VM and this machine: never more than a few pieces of them in memory.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use bytes::{Buf, Bytes};
use imp_embedded::client;
use imp_protocol::connection::Connection;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::{OpenArchive, ReadArchiveRequest, WriteArchiveInput, write_archive_input};
use imp_protocol::lane::{self, Lane};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::Links;
use super::left_out::LeftOut;
use super::pack::Packer;

/// Largest piece that is sent at once.
const CHUNK: usize = 256 << 10;
/// Bytes behind the end of an archive that are passed over.
const MOST_PADDING: u64 = 1 << 20;
/// Pieces on their way.
const QUEUE: usize = 4;

/// An archive that comes from a VM.
pub(super) struct Chunks {
    /// What the messages of the call hold: nothing, when there is a lane.
    data: mpsc::Receiver<Result<Bytes, Status>>,
    lane: Option<Lane>,
    left_out: Arc<Mutex<LeftOut>>,
}

pub(super) async fn read(
    connection: Connection,
    lane: Option<Lane>,
    path: &OsStr,
    links: Links,
) -> anyhow::Result<Chunks> {
    let request = ReadArchiveRequest {
        path: Bytes::copy_from_slice(path.as_bytes()),
        follow_link: links == Links::Followed,
        lane: lane.as_ref().map(Lane::number),
    };
    let answer = FilesClient::new(connection).read_archive(request).await;
    let mut stream = answer.map_err(client::Error::from)?.into_inner();
    let (sender, data) = mpsc::channel(QUEUE);
    let left_out = Arc::<Mutex<LeftOut>>::default();
    let sockets = Arc::clone(&left_out);
    let watched = lane.clone();
    tokio::spawn(async move {
        loop {
            let chunk = match stream.message().await {
                Ok(Some(chunk)) => {
                    let mut sockets = sockets.lock().unwrap_or_else(PoisonError::into_inner);
                    for name in chunk.left_out {
                        sockets.add(Path::new(OsStr::from_bytes(&name)), "a socket");
                    }
                    if chunk.data.is_empty() {
                        continue;
                    }
                    Ok(chunk.data)
                }
                Ok(None) => {
                    if let Some(lane) = watched {
                        lane.call_ended();
                    }
                    return;
                }
                Err(status) => {
                    if let Some(lane) = &watched {
                        lane.hang_up();
                    }
                    Err(status)
                }
            };
            let failed = chunk.is_err();
            if sender.send(chunk).await.is_err() || failed {
                return;
            }
        }
    });
    Ok(Chunks { data, lane, left_out })
}

impl Chunks {
    /// What the archive does not hold; all of it is known at the archive's end.
    pub(super) fn left_out(&self) -> Arc<Mutex<LeftOut>> {
        Arc::clone(&self.left_out)
    }

    /// For a thread that may block.
    pub(super) fn into_reader(self) -> Box<dyn Read> {
        match self.lane {
            Some(lane) => Box::new(LaneReader { lane, chunks: None, call: self.data }),
            None => Box::new(Reader { data: self.data, current: Bytes::new() }),
        }
    }
}

/// Reads what is behind an archive: then all that is said about it has been heard.
pub(super) fn finish(archive: &mut impl Read) -> io::Result<()> {
    io::copy(&mut archive.take(MOST_PADDING), &mut io::sink()).map(drop)
}

/// An archive on a lane; what the call says is what counts.
struct LaneReader {
    lane: Lane,
    /// Once the guest has taken the lane.
    chunks: Option<lane::Reader<Lane>>,
    call: mpsc::Receiver<Result<Bytes, Status>>,
}

impl LaneReader {
    fn chunk(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.chunks.is_none() {
            self.lane.taken()?;
        }
        self.chunks.get_or_insert_with(|| lane::Reader::new(self.lane.clone())).read(buffer)
    }
}

impl Read for LaneReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.chunk(buffer);
        if matches!(read, Ok(count) if count > 0) || buffer.is_empty() {
            return read;
        }
        if read.is_err() {
            self.lane.hang_up();
        }
        match self.call.blocking_recv() {
            Some(Err(status)) => Err(io::Error::other(client::Error::from(status))),
            Some(Ok(_)) => Err(io::ErrorKind::InvalidData.into()),
            None => read,
        }
    }
}

struct Reader {
    data: mpsc::Receiver<Result<Bytes, Status>>,
    current: Bytes,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.data.blocking_recv() {
                Some(Ok(chunk)) => self.current = chunk,
                Some(Err(status)) => return Err(io::Error::other(client::Error::from(status))),
                None => return Ok(0),
            }
        }
        let length = buffer.len().min(self.current.len());
        self.current.split_to(length).copy_to_slice(buffer.get_mut(..length).unwrap_or_default());
        Ok(length)
    }
}

/// What an archive for a VM is made of.
pub(super) enum Packed {
    /// Somebody else's archive.
    Stdin,
    /// What is in a directory.
    Directory { directory: PathBuf, top: Top },
    /// One file, or link, under a name.
    Entry { source: PathBuf, name: OsString },
}

/// What becomes of the directory that the content of another one goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Top {
    /// It gets the other one's owner, mode and time.
    AsSource,
    /// It was there before, and stays as it is.
    AsItIs,
}

/// Sends an archive to a VM; returns when all of it is in its place, with what is not in it.
pub(super) async fn write(
    connection: Connection,
    lane: Option<Lane>,
    open: OpenArchive,
    packed: Packed,
) -> anyhow::Result<LeftOut> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let open = OpenArchive { lane: lane.as_ref().map(Lane::number), ..open };
    let open = WriteArchiveInput { input: Some(write_archive_input::Input::Open(open)) };
    sender.send(open).await.context("the archive cannot be sent")?;
    let sending = lane.clone();
    let packing = tokio::task::spawn_blocking(move || match sending {
        Some(lane) => pack_to_lane(packed, lane),
        None => pack(packed, Writer(sender)),
    });
    // An archive that is torn here lacks its end, and the guest says so; what tore it is the better reason.
    let written = FilesClient::new(connection).write_archive(ReceiverStream::new(receiver)).await;
    if let Some(lane) = &lane {
        lane.hang_up();
    }
    let left_out = packing.await??;
    written.map_err(client::Error::from)?;
    Ok(left_out)
}

fn pack_to_lane(packed: Packed, mut lane: Lane) -> anyhow::Result<LeftOut> {
    // A call that does not take the lane says itself why.
    if lane.taken().is_err() {
        return Ok(LeftOut::default());
    }
    let mut chunks = lane::Writer::new(lane.clone());
    let packed = pack(packed, &mut chunks);
    match &packed {
        Ok(_) => chunks.finish().or_else(ended_by_guest)?,
        // Without its end the guest does not take it for a whole one.
        Err(_) => lane.hang_up(),
    }
    packed
}

fn pack(packed: Packed, output: impl Write) -> anyhow::Result<LeftOut> {
    let mut output = io::BufWriter::with_capacity(CHUNK, output);
    match packed {
        Packed::Stdin => {
            let copied = io::copy(&mut io::stdin().lock(), &mut output).and_then(|_| output.flush());
            copied.or_else(ended_by_guest).context("cannot read the archive")?;
            Ok(LeftOut::default())
        }
        Packed::Directory { directory, top } => {
            let mut packer = Packer::new(output);
            let packed = packer.directory(&directory, top).and_then(|()| packer.finish());
            packed.or_else(ended_by_guest).with_context(|| format!("cannot pack {}", directory.display()))
        }
        Packed::Entry { source, name } => {
            let mut packer = Packer::new(output);
            let packed = packer.entry(&source, Path::new(&name)).and_then(|()| packer.finish());
            packed.or_else(ended_by_guest).with_context(|| format!("cannot pack {}", source.display()))
        }
    }
}

/// The guest says itself why it takes no more.
fn ended_by_guest<T: Default>(error: io::Error) -> io::Result<T> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(T::default()) } else { Err(error) }
}

struct Writer(mpsc::Sender<WriteArchiveInput>);

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = bytes.get(..bytes.len().min(CHUNK)).unwrap_or(bytes);
        let input = write_archive_input::Input::Data(Bytes::copy_from_slice(part));
        let input = WriteArchiveInput { input: Some(input) };
        self.0.blocking_send(input).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
