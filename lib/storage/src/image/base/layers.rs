//! Reads and unpacks layers on a thread of their own, in order, hashing what comes out.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest as _, Sha256};

use super::{Error, LayerSource, Limits, Refusal};
use crate::blob::digest::Digest;

/// Unpacked bytes that travel together.
const CHUNK: usize = 256 << 10;
/// Chunks between the two threads.
const CHUNKS_AHEAD: usize = 16;

/// How a layer's tar is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// What a layer's media type says, by the OCI image specification or by Docker's manifest schema 2.
    pub fn of_media_type(media_type: &str) -> Option<Self> {
        match media_type {
            "application/vnd.oci.image.layer.v1.tar"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar"
            | "application/vnd.docker.image.rootfs.diff.tar" => Some(Self::None),
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip"
            | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip" => Some(Self::Gzip),
            "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Some(Self::Zstd),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::None => "an uncompressed tar",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    /// Compares with how the content starts; says what it is where it is something else.
    fn contradiction(self, start: &[u8]) -> Option<&'static str> {
        let found = match start {
            [0x1f, 0x8b, ..] => Some(Self::Gzip),
            // A frame, or one of the frames that a reader skips.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => return Some("xz"),
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, ..] => return Some("bzip2"),
            // Cut short; the decoder says so.
            [] => return None,
            _ => Some(Self::None),
        };
        found.filter(|found| *found != self).map(Self::name)
    }
}

enum Message {
    Chunk {
        bytes: Vec<u8>,
        /// Stored bytes of all layers that were read so far.
        read: u64,
    },
    /// The layer is complete and has this diff id.
    End(Digest),
    Failed(Error),
}

/// The unpacked layers on the side of the reader: one stream after the other.
pub(super) struct Unpacked {
    messages: Receiver<Message>,
    empty: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    position: usize,
    read: u64,
    diff_id: Option<Digest>,
}

/// The side of the thread that unpacks.
pub(super) struct Unpacker {
    messages: SyncSender<Message>,
    empty: Receiver<Vec<u8>>,
}

pub(super) fn pipe() -> (Unpacker, Unpacked) {
    let (messages, received) = sync_channel(CHUNKS_AHEAD);
    let (empty, returned) = channel();
    let unpacked =
        Unpacked { messages: received, empty, chunk: Vec::new(), position: 0, read: 0, diff_id: None };
    (Unpacker { messages, empty: returned }, unpacked)
}

/// The other side is gone: it has failed and knows why.
struct HungUp;

enum Stop {
    HungUp,
    Failed(Error),
}

impl From<HungUp> for Stop {
    fn from(_: HungUp) -> Self {
        Self::HungUp
    }
}

impl Unpacker {
    /// Unpacks `layers` in order until the end, a failure, or the other side is gone.
    pub(super) fn run(self, layers: &[LayerSource], limits: &Limits) {
        let mut read = 0;
        let mut left = limits.uncompressed_bytes;
        for layer in layers {
            match self.unpack(layer, limits, &mut read, &mut left) {
                Ok(()) => {}
                Err(Stop::HungUp) => return,
                Err(Stop::Failed(error)) => {
                    // If nobody listens, nobody needs to know.
                    let _ = self.messages.send(Message::Failed(error));
                    return;
                }
            }
        }
    }

    fn unpack(
        &self,
        layer: &LayerSource,
        limits: &Limits,
        read: &mut u64,
        left: &mut u64,
    ) -> Result<(), Stop> {
        let before = *read;
        let mut decoder = Decoder::open(layer).map_err(Stop::Failed)?;
        let mut hash = Sha256::new();
        loop {
            let mut bytes = self.empty.try_recv().unwrap_or_default();
            bytes.clear();
            let more = decoder
                .fill(&mut bytes)
                .map_err(|source| Stop::Failed(Error::Inflate { layer: layer.digest, source }))?;
            hash.update(&bytes);
            let length = bytes.len() as u64;
            *left = left.checked_sub(length).ok_or_else(|| {
                let reason = Refusal::Uncompressed(limits.uncompressed_bytes);
                Stop::Failed(Error::Layer { layer: layer.digest, reason })
            })?;
            *read = before + decoder.read();
            if length > 0 {
                self.send(Message::Chunk { bytes, read: *read })?;
            }
            if !more {
                break;
            }
        }
        self.send(Message::End(Digest::from_bytes(hash.finalize().into())))?;
        Ok(())
    }

    fn send(&self, message: Message) -> Result<(), HungUp> {
        self.messages.send(message).map_err(|_| HungUp)
    }
}

/// The packed file, counting what was read of it.
struct Counted {
    file: BufReader<File>,
    read: u64,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read += read as u64;
        Ok(read)
    }
}

impl BufRead for Counted {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.file.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.read += bytes as u64;
        self.file.consume(bytes);
    }
}

enum Decoder {
    None(Counted),
    Gzip(Box<MultiGzDecoder<Counted>>),
    Zstd(zstd::stream::read::Decoder<'static, Counted>),
}

impl Decoder {
    fn open(layer: &LayerSource) -> Result<Self, Error> {
        let unreadable = |source| Error::Read { layer: layer.digest, path: layer.path.clone(), source };
        let declared = Compression::of_media_type(&layer.media_type)
            .ok_or_else(|| Error::MediaType { layer: layer.digest, media_type: layer.media_type.clone() })?;
        let file = File::open(&layer.path).map_err(unreadable)?;
        let mut file = BufReader::with_capacity(CHUNK, file);
        let start = file.fill_buf().map_err(unreadable)?;
        if let Some(found) = declared.contradiction(start) {
            return Err(Error::Compression { layer: layer.digest, declared: declared.name(), found });
        }
        let counted = Counted { file, read: 0 };
        Ok(match declared {
            Compression::None => Self::None(counted),
            Compression::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(counted))),
            // Windows past 128 MiB are refused by the decoder's default.
            Compression::Zstd => {
                Self::Zstd(zstd::stream::read::Decoder::with_buffer(counted).map_err(unreadable)?)
            }
        })
    }

    /// Fills `bytes` up to one chunk; says whether there may be more.
    fn fill(&mut self, bytes: &mut Vec<u8>) -> io::Result<bool> {
        bytes.resize(CHUNK, 0);
        let mut length = 0;
        while let Some(rest) = bytes.get_mut(length..).filter(|rest| !rest.is_empty()) {
            let read = match self {
                Self::None(file) => file.read(rest),
                Self::Gzip(decoder) => decoder.read(rest),
                Self::Zstd(decoder) => decoder.read(rest),
            };
            match read {
                Ok(0) => {
                    bytes.truncate(length);
                    return Ok(false);
                }
                Ok(read) => length += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn read(&self) -> u64 {
        match self {
            Self::None(file) => file.read,
            Self::Gzip(decoder) => decoder.get_ref().read,
            Self::Zstd(decoder) => decoder.get_ref().read,
        }
    }
}

/// A failure of the unpacking thread on its way through [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("unpacking failed")]
pub(super) struct Failed(#[source] pub(super) Box<Error>);

impl Unpacked {
    /// Stored bytes of all layers that were read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Reads the current layer to its end, whatever is left of it, and gives its diff id. The next read starts the next layer.
    pub(super) fn end_layer(&mut self) -> io::Result<Digest> {
        loop {
            let left = self.fill_buf()?.len();
            if left == 0 {
                return self.diff_id.take().ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
            }
            self.consume(left);
        }
    }
}

impl BufRead for Unpacked {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.position == self.chunk.len() && self.diff_id.is_none() {
            // The thread allocates anew if it has ended or is faster.
            let _ = self.empty.send(std::mem::take(&mut self.chunk));
            self.position = 0;
            match self.messages.recv() {
                Ok(Message::Chunk { bytes, read }) => (self.chunk, self.read) = (bytes, read),
                Ok(Message::End(diff_id)) => self.diff_id = Some(diff_id),
                Ok(Message::Failed(error)) => return Err(io::Error::other(Failed(Box::new(error)))),
                Err(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        Ok(self.chunk.get(self.position..).unwrap_or(&[]))
    }

    fn consume(&mut self, bytes: usize) {
        self.position += bytes;
    }
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let length = available.len().min(buffer.len());
        if let (Some(to), Some(from)) = (buffer.get_mut(..length), available.get(..length)) {
            to.copy_from_slice(from);
        }
        self.consume(length);
        Ok(length)
    }
}
