//! Content of single files, in and out.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use bytes::Bytes;
use imp_protocol::guest::write_file_input::Input;
use imp_protocol::guest::{FileChunk, OpenForWrite, WriteFileInput};
use rustix::fs::OFlags;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::attributes::{self, Attributes, NewAttributes};
use super::content::{Content, Piece, Zeros};
use super::error::Error;
use super::pieces::{Pieces, Spare};
use super::rename::temporary_beside;

/// A file that is read.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    pieces: Pieces,
    left: u64,
}

impl Source {
    /// `length` 0 is all there is.
    pub(crate) fn open(path: PathBuf, offset: u64, length: u64) -> Result<Self, Error> {
        // Non-blocking, so that a FIFO does not hold the thread; for regular files it means nothing.
        let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&path);
        let mut file = file.map_err(Error::file("cannot open", &path))?;
        refuse_special(&file, &path)?;
        if offset > 0 {
            file.seek(SeekFrom::Start(offset)).map_err(Error::file("cannot read", &path))?;
        }
        let left = if length == 0 { u64::MAX } else { length };
        let size = file.metadata().map_or(0, |metadata| metadata.len());
        let pieces =
            Pieces::new(file.into(), offset, size.saturating_sub(offset).min(left), Spare::default());
        Ok(Self { path, pieces, left })
    }

    /// Empty at the end. A file of /proc gives less at a time than a disk.
    fn next_piece(&mut self) -> Result<Bytes, Error> {
        let piece = self.pieces.next(self.left).map_err(Error::errno("cannot read", &self.path))?;
        self.left -= piece.len() as u64;
        Ok(piece)
    }
}

fn refuse_special(file: &File, path: &std::path::Path) -> Result<(), Error> {
    let metadata = file.metadata().map_err(Error::file("cannot open", path))?;
    match () {
        () if metadata.is_dir() => Err(Error::NotRegular(path.to_owned(), "a directory")),
        () if !metadata.is_file() => Err(Error::NotRegular(path.to_owned(), "a device, FIFO or socket")),
        () => Ok(()),
    }
}

/// Sends a file while the next piece is read.
pub(crate) async fn send(mut source: Source, chunks: mpsc::Sender<Result<FileChunk, Status>>) {
    loop {
        let step = crate::blocking(move || source.next_piece().map(|piece| (source, piece))).await;
        let status = match step {
            Ok(Ok((_, piece))) if piece.is_empty() => return,
            Ok(Ok((rest, piece))) => {
                source = rest;
                for data in super::chunks(piece) {
                    if chunks.send(Ok(FileChunk { data, ..Default::default() })).await.is_err() {
                        return;
                    }
                }
                continue;
            }
            Ok(Err(error)) => error.into(),
            Err(status) => status,
        };
        return drop(chunks.send(Err(status)).await);
    }
}

/// A file that is written: under a temporary name until it is whole. Dropped before that, it leaves nothing.
#[derive(Debug)]
pub(crate) struct Sink {
    path: PathBuf,
    size: u64,
    /// None once it is whole.
    end: Option<End>,
}

#[derive(Debug)]
enum End {
    /// Renamed to its own name, with these attributes.
    Rename { content: Content, temporary: PathBuf, attributes: NewAttributes },
    /// Appended to what is there; on a break it is cut back to this length.
    Append { file: File, length: u64, attributes: Attributes },
}

impl Sink {
    pub(crate) fn open(path: PathBuf, open: &OpenForWrite) -> Result<Self, Error> {
        if open.make_parents {
            attributes::make_parents(&path)?;
        }
        // A link is written through: what it leads to is replaced, not the link.
        let path = fs::canonicalize(&path).unwrap_or(path);
        let there = fs::metadata(&path).ok();
        match &there {
            Some(there) if there.is_dir() => return Err(Error::NotRegular(path, "a directory")),
            Some(there) if !there.is_file() => {
                return Err(Error::NotRegular(path, "a device, FIFO or socket"));
            }
            _ => {}
        }
        let wanted = Attributes::from(open.attributes);
        if let Some(there) = there.as_ref().filter(|_| open.append) {
            let file = File::options().append(true).open(&path).map_err(Error::file("cannot open", &path))?;
            let end = End::Append { file, length: there.len(), attributes: wanted };
            return Ok(Self { path, size: 0, end: Some(end) });
        }
        let attributes = NewAttributes {
            mode: wanted.mode.or(there.as_ref().map(|there| there.mode() & 0o7777)).unwrap_or(0o644),
            uid: wanted.uid.or(there.as_ref().map(MetadataExt::uid)).unwrap_or(0),
            gid: wanted.gid.or(there.as_ref().map(MetadataExt::gid)).unwrap_or(0),
            modified_nanoseconds: wanted.modified_nanoseconds,
        };
        let temporary = temporary_beside(&path);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&temporary);
        let file = file.map_err(Error::file("cannot create", &path))?;
        let content = Content::new(OwnedFd::from(file), Piece::default(), Zeros::Written);
        Ok(Self { path, size: 0, end: Some(End::Rename { content, temporary, attributes }) })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = match &mut self.end {
            Some(End::Rename { content, .. }) => content.write(bytes).map_err(Into::into),
            Some(End::Append { file, .. }) => file.write_all(bytes),
            None => Ok(()),
        };
        written.map_err(Error::file("cannot write", &self.path))?;
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// Size of the whole file.
    pub(crate) fn finish(mut self) -> Result<u64, Error> {
        let failed = "cannot write";
        if let Some(End::Append { file, length, attributes }) = &self.end {
            // An error is a break like any other: dropped, this cuts back what was appended.
            attributes.apply(file).map_err(Error::errno(failed, &self.path))?;
            let size = length + self.size;
            self.end = None;
            return Ok(size);
        }
        match self.end.take() {
            Some(End::Rename { content, temporary, attributes }) => {
                let whole = content.finish().and_then(|(file, _)| attributes.apply(&file));
                let renamed = whole.map_err(Into::into).and_then(|()| fs::rename(&temporary, &self.path));
                renamed.map_err(|error| {
                    drop(fs::remove_file(&temporary));
                    Error::file(failed, &self.path)(error)
                })?;
                Ok(self.size)
            }
            Some(End::Append { .. }) | None => Ok(self.size),
        }
    }
}

/// Bytes that wait while others are written: a slow disk holds the host back.
const MOST_WAITING: usize = 1 << 20;

/// Writes a file from a stream of `data`, and returns its size when the stream has ended well. What breaks it before
/// drops the sink, and with it what was written.
///
/// What arrives while a thread writes is written together next: one change of threads for many small messages.
pub(crate) async fn receive(sink: Sink, mut inputs: Streaming<WriteFileInput>) -> Result<u64, Status> {
    let mut waiting = Vec::new();
    let (mut waiting_bytes, mut open) = (0, true);
    let mut idle = Some(sink);
    let mut writing = None;
    while open || writing.is_some() || !waiting.is_empty() {
        if let Some(mut sink) = idle.take_if(|_| !waiting.is_empty()) {
            let chunks = std::mem::take(&mut waiting);
            waiting_bytes = 0;
            writing = Some(tokio::task::spawn_blocking(move || {
                chunks.iter().try_for_each(|chunk: &Bytes| sink.write(chunk)).map(|()| sink)
            }));
        }
        tokio::select! {
            biased;
            message = inputs.message(), if open && waiting_bytes < MOST_WAITING => match message? {
                Some(WriteFileInput { input: Some(Input::Data(bytes)) }) => {
                    waiting_bytes += bytes.len();
                    waiting.push(bytes);
                }
                Some(_) => return Err(Status::invalid_argument("after `open` only `data` follows")),
                None => open = false,
            },
            written = finished(&mut writing), if writing.is_some() => {
                writing = None;
                idle = Some(written??);
            }
        }
    }
    // A stream that the host has reset looks ended too, but then this call is dropped when it next waits.
    tokio::task::yield_now().await;
    match idle {
        Some(sink) => Ok(crate::blocking(move || sink.finish()).await??),
        None => Err(Status::internal("the file was not written to its end")),
    }
}

/// The end of a step of work; never, when there is none.
async fn finished<T>(step: &mut Option<JoinHandle<T>>) -> Result<T, Status> {
    match step {
        Some(step) => step.await.map_err(|_| Status::internal("the agent failed in this call; others go on")),
        None => std::future::pending().await,
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        match &self.end {
            Some(End::Rename { temporary, .. }) => drop(fs::remove_file(temporary)),
            Some(End::Append { file, length, .. }) => drop(file.set_len(*length)),
            None => {}
        }
    }
}
