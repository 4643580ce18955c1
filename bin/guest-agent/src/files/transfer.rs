//! Content of single files, in and out.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
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
use super::error::Error;
use super::rename::temporary_beside;

/// Bytes in one message: large enough that its cost is small, small enough that streams take turns.
pub(crate) const CHUNK: usize = 256 << 10;

/// A file that is read.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: File,
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
        Ok(Self { path, file, left: if length == 0 { u64::MAX } else { length } })
    }

    /// Empty at the end.
    fn next_chunk(&mut self) -> Result<Bytes, Error> {
        let wanted = self.left.min(CHUNK as u64) as usize;
        let mut chunk = Vec::with_capacity(wanted);
        if wanted == 0 {
            return Ok(chunk.into());
        }
        // One large read is enough on a disk; a file of /proc gives less at a time.
        rustix::io::read(&self.file, rustix::buffer::spare_capacity(&mut chunk))
            .map_err(Error::errno("cannot read", &self.path))?;
        chunk.truncate(wanted);
        self.left -= chunk.len() as u64;
        Ok(chunk.into())
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

/// Sends a file while the next chunk is read.
pub(crate) async fn send(mut source: Source, chunks: mpsc::Sender<Result<FileChunk, Status>>) {
    loop {
        let step = crate::blocking(move || source.next_chunk().map(|chunk| (source, chunk))).await;
        let message = match step {
            Ok(Ok((_, chunk))) if chunk.is_empty() => return,
            Ok(Ok((rest, data))) => {
                source = rest;
                if chunks.send(Ok(FileChunk { data })).await.is_err() {
                    return;
                }
                continue;
            }
            Ok(Err(error)) => error.into(),
            Err(status) => status,
        };
        return drop(chunks.send(Err(message)).await);
    }
}

/// A file that is written: under a temporary name until it is whole. Dropped before that, it leaves nothing.
#[derive(Debug)]
pub(crate) struct Sink {
    path: PathBuf,
    file: File,
    size: u64,
    end: End,
}

#[derive(Debug)]
enum End {
    /// Renamed to its own name, with these attributes.
    Rename {
        temporary: PathBuf,
        attributes: NewAttributes,
    },
    /// Appended to what is there; on a break it is cut back to this length.
    Append {
        length: u64,
        attributes: Attributes,
    },
    Done,
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
            return Ok(Self {
                path,
                file,
                size: 0,
                end: End::Append { length: there.len(), attributes: wanted },
            });
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
        Ok(Self { path, file, size: 0, end: End::Rename { temporary, attributes } })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(Error::file("cannot write", &self.path))?;
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// Size of the whole file.
    pub(crate) fn finish(mut self) -> Result<u64, Error> {
        let failed = "cannot write";
        match &self.end {
            End::Rename { temporary, attributes } => {
                attributes.apply(&self.file).map_err(Error::errno(failed, &self.path))?;
                fs::rename(temporary, &self.path).map_err(Error::file(failed, &self.path))?;
                self.end = End::Done;
                Ok(self.size)
            }
            End::Append { length, attributes } => {
                let whole = length + self.size;
                attributes::set(&self.path, attributes, super::stat::Links::Follow)?;
                self.end = End::Done;
                Ok(whole)
            }
            End::Done => Ok(self.size),
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
            End::Rename { temporary, .. } => drop(fs::remove_file(temporary)),
            End::Append { length, .. } => drop(self.file.set_len(*length)),
            End::Done => {}
        }
    }
}
