//! Readers of a VM's log.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use tokio::sync::watch;

use super::{Error, HEADER, Header, LogEnd, LogEntry, LogQuery, file, files};

/// Reads entries in order. What is dropped before it was read is left out.
pub struct LogReader {
    directory: PathBuf,
    number: u64,
    file: Option<File>,
    position: u64,
    query: LogQuery,
    /// Entries that the tail leaves out, and bytes of the first one that it takes.
    skip: Option<Skip>,
    /// Present while more may come.
    grown: Option<watch::Receiver<u64>>,
}

/// Where the last lines begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Skip {
    entries: usize,
    bytes: usize,
}

impl LogReader {
    /// `grown` changes with the log and ends when no more will come.
    pub fn open(
        directory: &Path,
        query: LogQuery,
        grown: Option<watch::Receiver<u64>>,
    ) -> Result<Self, Error> {
        let first = files(directory).first().copied().unwrap_or(0);
        let grown = match query.end {
            LogEnd::Now => None,
            LogEnd::Follow => grown,
        };
        let mut reader = Self {
            directory: directory.to_owned(),
            number: first,
            file: None,
            position: 0,
            query,
            skip: None,
            grown,
        };
        if let Some(lines) = query.tail {
            reader.skip = Some(reader.find_tail(lines)?);
            reader.number = first;
            reader.file = None;
            reader.position = 0;
        }
        Ok(reader)
    }

    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<LogEntry>, Error> {
        loop {
            // Marked as seen before looking, so that growth while looking is not missed.
            if let Some(grown) = &mut self.grown {
                grown.borrow_and_update();
            }
            if let Some(entry) = self.next_wanted()? {
                return Ok(Some(entry));
            }
            match &mut self.grown {
                None => return Ok(None),
                Some(grown) => {
                    if grown.changed().await.is_err() {
                        // The writer is gone: one more look for what it wrote last.
                        self.grown = None;
                    }
                }
            }
        }
    }

    fn next_wanted(&mut self) -> Result<Option<LogEntry>, Error> {
        while let Some(mut entry) = self.next_recorded()? {
            if let Some(skip) = &mut self.skip {
                if skip.entries > 0 {
                    skip.entries -= 1;
                    continue;
                }
                let bytes = skip.bytes;
                self.skip = None;
                entry.offset = entry.offset.saturating_add(entry.stream.output(bytes as u64));
                entry.data.drain(..bytes.min(entry.data.len()));
            }
            let wanted = self.query.since.is_none_or(|since| entry.at >= since) && !entry.data.is_empty();
            if wanted {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// The entry at the position; `None` when it is not (wholly) there yet.
    fn next_recorded(&mut self) -> Result<Option<LogEntry>, Error> {
        loop {
            let path = file(&self.directory, self.number);
            let failed = |source| Error::Read { path: path.clone(), source };
            if self.file.is_none() {
                match File::open(&path) {
                    Ok(open) => self.file = Some(open),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        // Dropped meanwhile, or not begun yet.
                        let next = files(&self.directory).into_iter().find(|n| *n > self.number);
                        let Some(next) = next else { return Ok(None) };
                        self.number = next;
                        self.position = 0;
                        continue;
                    }
                    Err(source) => return Err(failed(source)),
                }
            }
            let Some(open) = &mut self.file else { continue };
            if let Some((header, data)) = read_frame(open, self.position, &path)? {
                self.position += (HEADER + data.len()) as u64;
                return Ok(Some(LogEntry::of(header, data)));
            }
            // The end of this file is the end of all unless a later one has been begun.
            if !files(&self.directory).iter().any(|n| *n > self.number) {
                return Ok(None);
            }
            // Begun after the last look at this one: nothing is added here any more, but something may have been.
            if let Some((header, data)) = read_frame(open, self.position, &path)? {
                self.position += (HEADER + data.len()) as u64;
                return Ok(Some(LogEntry::of(header, data)));
            }
            self.number += 1;
            self.position = 0;
            self.file = None;
        }
    }

    fn find_tail(&mut self, lines: usize) -> Result<Skip, Error> {
        // Starts of lines, the last `lines` of them; bounded by the size of the log.
        let mut starts = std::collections::VecDeque::new();
        let (mut entries, mut at_start) = (0, true);
        while let Some(entry) = self.next_recorded()? {
            for (index, byte) in entry.data.iter().enumerate() {
                if at_start {
                    starts.push_back(Skip { entries, bytes: index });
                    if starts.len() > lines {
                        starts.pop_front();
                    }
                }
                at_start = *byte == b'\n';
            }
            entries += 1;
        }
        Ok(starts.front().copied().unwrap_or(Skip { entries, bytes: 0 }))
    }
}

fn read_frame<F: Read + Seek>(
    file: &mut F,
    position: u64,
    path: &Path,
) -> Result<Option<(Header, Vec<u8>)>, Error> {
    let read = |file: &mut F, from: u64, bytes: &mut [u8]| -> Result<bool, Error> {
        let result = file.seek(SeekFrom::Start(from)).and_then(|_| file.read_exact(bytes));
        match result {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(source) => Err(Error::Read { path: path.to_owned(), source }),
        }
    };
    let mut bytes = [0; HEADER];
    if !read(file, position, &mut bytes)? {
        return Ok(None);
    }
    let header = Header::decode(&bytes).ok_or_else(|| Error::Damaged { path: path.to_owned(), position })?;
    let mut data = vec![0; header.length as usize];
    if !read(file, position + HEADER as u64, &mut data)? {
        return Ok(None);
    }
    // One that found no room is cut off, and another one takes its place: this may have been read from both.
    let mut again = [0; HEADER];
    Ok((read(file, position, &mut again)? && again == bytes).then_some((header, data)))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::logs::LogStream;

    /// What is read of it after the first time is another file.
    struct Changes {
        files: [Cursor<Vec<u8>>; 2],
        reads: usize,
    }

    impl Read for Changes {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.reads += 1;
            self.files[usize::from(self.reads > 1)].read(buffer)
        }
    }

    impl Seek for Changes {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.files[0].seek(to)?;
            self.files[1].seek(to)
        }
    }

    #[test]
    fn a_frame_that_another_one_took_the_place_of_while_it_was_read_is_none() {
        let frame = |at, data: &[u8]| {
            let header = Header { stream: LogStream::Stdout, length: data.len() as u32, at, offset: 0 };
            Cursor::new([&header.encode()[..], data].concat())
        };
        let (torn, whole) = (frame(1, b"torn"), frame(2, b"whole"));
        let read = |files| {
            let read = read_frame(&mut Changes { files, reads: 0 }, 0, Path::new("log")).unwrap();
            read.map(|(_, data)| data)
        };
        assert_eq!(read([torn, whole.clone()]), None);
        assert_eq!(read([whole.clone(), whole]), Some(b"whole".to_vec()));
    }
}
