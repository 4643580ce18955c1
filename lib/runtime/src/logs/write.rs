//! The one writer of a VM's log.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::watch;

use super::{Error, FILE, HEADER, Header, LONGEST, LogStream, file, files};

/// Appends frames; a whole one or none is there after a crash.
pub(crate) struct LogWriter {
    directory: PathBuf,
    number: u64,
    file: File,
    size: u64,
    offset: u64,
    /// Counts appended frames; readers wait on it.
    grown: Arc<watch::Sender<u64>>,
}

impl LogWriter {
    /// Goes on with the log that is there, or begins one.
    pub(crate) fn open(directory: &Path, grown: Arc<watch::Sender<u64>>) -> Result<Self, Error> {
        let failed = |path: &Path, source| Error::Open { path: path.to_owned(), source };
        fs::create_dir_all(directory).map_err(|source| failed(directory, source))?;
        let number = files(directory).last().copied().unwrap_or(0);
        let path = file(directory, number);
        let mut open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|source| failed(&path, source))?;
        let (size, _) = end_of_whole_frames(&mut open).map_err(|source| failed(&path, source))?;
        let offset = recorded(directory)?;
        open.set_len(size)
            .and_then(|()| open.seek(SeekFrom::Start(size)))
            .map_err(|source| failed(&path, source))?;
        Ok(Self { directory: directory.to_owned(), number, file: open, size, offset, grown })
    }

    /// Position in the process's whole output up to which it has been recorded.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Output that nobody will ever record.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.offset = self.offset.saturating_add(bytes);
    }

    pub(crate) fn append(&mut self, stream: LogStream, data: &[u8]) -> Result<(), Error> {
        for part in data.chunks(LONGEST) {
            let offset = self.offset;
            // Counted also when it cannot be written: it has been taken from the process.
            self.offset = self.offset.saturating_add(part.len() as u64);
            let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            let header = Header {
                stream,
                length: part.len() as u32,
                at: u64::try_from(nanoseconds).unwrap_or(u64::MAX),
                offset,
            };
            self.frame(header, part)
                .map_err(|source| Error::Write { path: file(&self.directory, self.number), source })?;
            self.grown.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    fn frame(&mut self, header: Header, data: &[u8]) -> io::Result<()> {
        if self.size >= FILE {
            self.next_file()?;
        }
        let mut bytes = Vec::with_capacity(HEADER + data.len());
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(data);
        if let Err(error) = self.file.write_all(&bytes) {
            // Half a frame, as on a full disk, would hide all that follow.
            self.file.set_len(self.size)?;
            self.file.seek(SeekFrom::Start(self.size))?;
            return Err(error);
        }
        self.size += bytes.len() as u64;
        Ok(())
    }

    fn next_file(&mut self) -> io::Result<()> {
        let next = self.number + 1;
        self.file =
            OpenOptions::new().create_new(true).read(true).write(true).open(file(&self.directory, next))?;
        self.number = next;
        self.size = 0;
        for old in files(&self.directory).into_iter().filter(|n| n + 1 < next) {
            fs::remove_file(file(&self.directory, old))?;
        }
        Ok(())
    }
}

/// Position in the process's whole output up to which the log has it.
pub(crate) fn recorded(directory: &Path) -> Result<u64, Error> {
    // A file that has no frame yet goes on where the one before it ended.
    for number in files(directory).into_iter().rev() {
        let path = file(directory, number);
        match File::open(&path).and_then(|mut open| end_of_whole_frames(&mut open)) {
            Ok((_, Some(offset))) => return Ok(offset),
            Ok((_, None)) => {}
            // Dropped meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(Error::Open { path, source }),
        }
    }
    Ok(0)
}

/// Size of the part that is whole frames, and the offset after the last of them.
fn end_of_whole_frames(file: &mut File) -> io::Result<(u64, Option<u64>)> {
    let size = file.metadata()?.len();
    let (mut position, mut offset) = (0, None);
    let mut bytes = [0; HEADER];
    while position + HEADER as u64 <= size {
        file.seek(SeekFrom::Start(position))?;
        file.read_exact(&mut bytes)?;
        let Some(header) = Header::decode(&bytes) else { break };
        let next = position + HEADER as u64 + u64::from(header.length);
        if next > size {
            break;
        }
        position = next;
        offset = Some(header.offset.saturating_add(header.length.into()));
    }
    Ok((position, offset))
}
