//! Output of a main process, recorded in bounded files and read back while it grows.
//!
//! Two files at the most exist, named by their number: the current one and the one before. Each is a sequence of frames:
//!
//! ```text
//! magic "IL" │ stream u8 │ 0 │ length u32 │ time u64 (ns since the epoch) │ offset u64 │ data      little endian
//! ```
//!
//! The offset is the position of the data in the process's whole output, so that a reader of the process, also one of a
//! later owner, knows from where on to ask for more. A note is no output: it stands where output could not be written.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

mod losses;
mod read;
mod write;

pub use read::LogReader;
pub(crate) use write::{LogWriter, recorded};

/// Size at which a file is full.
const FILE: u64 = 4 << 20;
/// Longest data of one frame.
const LONGEST: usize = 256 << 10;
const HEADER: usize = 24;

#[derive(Debug, Clone, Copy, Default)]
pub struct LogQuery {
    /// Only the last so many lines of what is there.
    pub tail: Option<usize>,
    pub since: Option<SystemTime>,
    pub end: LogEnd,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogEnd {
    /// Ends with what has been recorded so far.
    #[default]
    Now,
    /// Goes on until the VM has stopped.
    Follow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStream {
    Stdout,
    Stderr,
    /// A line of ours.
    Note,
}

/// A piece of output: not necessarily a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    pub stream: LogStream,
    pub at: SystemTime,
    /// Position of the data in the process's whole output.
    pub offset: u64,
    pub data: Vec<u8>,
}

impl LogEntry {
    fn of(header: Header, data: Vec<u8>) -> Self {
        Self { stream: header.stream, at: header.time(), offset: header.offset, data }
    }

    /// Position in the process's whole output behind this.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.stream.output(self.data.len() as u64))
    }

    /// What of it comes at or after a position of the whole output; none if all comes before.
    #[must_use]
    pub fn from_offset(mut self, offset: u64) -> Option<Self> {
        if self.stream == LogStream::Note {
            return (self.offset >= offset).then_some(self);
        }
        let before = usize::try_from(offset.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        if before >= self.data.len() && before > 0 {
            return None;
        }
        self.data.drain(..before);
        self.offset = self.offset.max(offset);
        Some(self)
    }
}

impl LogStream {
    /// How much of so many bytes is the process's own output.
    fn output(self, bytes: u64) -> u64 {
        match self {
            Self::Stdout | Self::Stderr => bytes,
            Self::Note => 0,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open the log {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the log {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the log {} is damaged at byte {position}", path.display())]
    Damaged { path: PathBuf, position: u64 },
}

/// What stands before the data of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    stream: LogStream,
    length: u32,
    at: u64,
    offset: u64,
}

impl Header {
    fn encode(self) -> [u8; HEADER] {
        let stream = match self.stream {
            LogStream::Stdout => 1,
            LogStream::Stderr => 2,
            LogStream::Note => 3,
        };
        let mut bytes = [0; HEADER];
        let parts = [
            &[b'I', b'L', stream, 0][..],
            &self.length.to_le_bytes()[..],
            &self.at.to_le_bytes()[..],
            &self.offset.to_le_bytes()[..],
        ];
        for (to, from) in bytes.iter_mut().zip(parts.concat()) {
            *to = from;
        }
        bytes
    }

    fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (at, rest) = rest.split_first_chunk::<8>()?;
        let (offset, _) = rest.split_first_chunk::<8>()?;
        let stream = match magic {
            [b'I', b'L', 1, 0] => LogStream::Stdout,
            [b'I', b'L', 2, 0] => LogStream::Stderr,
            [b'I', b'L', 3, 0] => LogStream::Note,
            _ => return None,
        };
        let length = u32::from_le_bytes(*length);
        let header =
            Self { stream, length, at: u64::from_le_bytes(*at), offset: u64::from_le_bytes(*offset) };
        (length as usize <= LONGEST).then_some(header)
    }

    fn time(self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.at)
    }
}

/// Numbers of the files that are there, lowest first.
fn files(directory: &std::path::Path) -> Vec<u64> {
    let number = |entry: std::fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("main.")?.strip_suffix(".log")?.parse::<u64>().ok()
    };
    let mut numbers: Vec<u64> =
        std::fs::read_dir(directory).into_iter().flatten().flatten().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

fn file(directory: &std::path::Path, number: u64) -> PathBuf {
    directory.join(format!("main.{number}.log"))
}

#[cfg(test)]
#[path = "logs/tests.rs"]
mod tests;
