//! The one writer of a VM's log.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tokio::sync::watch;

use super::losses::Losses;
use super::{Error, FILE, HEADER, Header, LONGEST, LogStream, file, files};
use crate::status::LostOutput;

/// Appends frames, each with a write of its own: a whole one or none is there, for a reader and after a crash, and a whole one
/// is never taken back.
pub(crate) struct LogWriter {
    directory: PathBuf,
    number: u64,
    file: File,
    /// Of the whole frames.
    size: u64,
    /// Whether half a frame follows them that could not be cut off.
    torn: bool,
    offset: u64,
    losses: Losses,
    /// Whether what was written last ended within a line.
    within_line: bool,
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
        open.set_len(size).map_err(|source| failed(&path, source))?;
        Ok(Self {
            directory: directory.to_owned(),
            number,
            file: open,
            size,
            torn: false,
            offset,
            losses: Losses::default(),
            within_line: false,
            grown,
        })
    }

    /// Position in the process's whole output up to which it has been recorded.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Output that nobody will ever record.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.offset = self.offset.saturating_add(bytes);
    }

    /// What cannot be written is lost, because it has been taken from the process. What is written next says how much.
    pub(crate) fn append(&mut self, stream: LogStream, data: &[u8]) {
        for part in data.chunks(LONGEST) {
            let written = self.note(part.len()).and_then(|()| self.write(&frame(stream, self.offset, part)));
            self.offset = self.offset.saturating_add(part.len() as u64);
            match written {
                Ok(()) => self.within_line = !part.ends_with(b"\n"),
                Err(error) => self.losses.add(part.len() as u64, &error),
            }
        }
    }

    /// Nothing comes any more: what is missing at the end is noted, if that can be. What is still to be told of losses.
    #[must_use]
    pub(crate) fn end(&mut self) -> Option<LostOutput> {
        if let Err(error) = self.note(0) {
            tracing::debug!(%error, "the end of a log is missing without a note");
        }
        self.losses.over();
        self.losses.rest()
    }

    /// What was lost, when there is something to say of it.
    pub(crate) fn news_of_losses(&mut self) -> Option<LostOutput> {
        self.losses.news()
    }

    /// Writes what stands for what is missing here, if something is, and ends that loss. Data of this length comes next.
    fn note(&mut self, length: usize) -> io::Result<()> {
        let Some(note) = self.losses.note() else { return Ok(()) };
        let line = if self.within_line { format!("\n{note}") } else { note };
        let note = frame(LogStream::Note, self.offset, line.as_bytes());
        self.begin()?;
        // A disk with room for notes alone would get one for each piece that is lost.
        self.has_room(note.len() + HEADER + length)?;
        self.write(&note)?;
        self.within_line = false;
        self.losses.over();
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> io::Result<()> {
        self.begin()?;
        if let Err(error) = self.file.write_all_at(frame, self.size) {
            // Half a frame, as on a full disk, would hide all that follow.
            self.torn = self.file.set_len(self.size).is_err();
            return Err(error);
        }
        self.size += frame.len() as u64;
        self.grown.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Behind the last whole frame of a file that is not full.
    fn begin(&mut self) -> io::Result<()> {
        if self.size >= FILE {
            self.next_file()?;
        }
        if self.torn {
            self.file.set_len(self.size)?;
            self.torn = false;
        }
        Ok(())
    }

    /// A file system that cannot answer is asked by writing.
    fn has_room(&self, bytes: usize) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.size, bytes as u64) {
            Err(error @ (Errno::NOSPC | Errno::DQUOT)) => Err(error.into()),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn next_file(&mut self) -> io::Result<()> {
        let next = self.number + 1;
        self.file =
            OpenOptions::new().create_new(true).read(true).write(true).open(file(&self.directory, next))?;
        self.number = next;
        self.size = 0;
        self.torn = false;
        for old in files(&self.directory).into_iter().filter(|n| n + 1 < next) {
            fs::remove_file(file(&self.directory, old))?;
        }
        Ok(())
    }
}

fn frame(stream: LogStream, offset: u64, data: &[u8]) -> Vec<u8> {
    let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let at = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
    let header = Header { stream, length: data.len() as u32, at, offset };
    [&header.encode()[..], data].concat()
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
        offset = Some(header.offset.saturating_add(header.stream.output(header.length.into())));
    }
    Ok((position, offset))
}

#[cfg(test)]
impl LogWriter {
    /// Has it write to a disk that is full; what it wrote to before.
    pub(crate) fn fill_its_disk(&mut self) -> File {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        std::mem::replace(&mut self.file, full)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::logs::{LogEntry, LogQuery, LogReader};

    fn writer(directory: &Path) -> LogWriter {
        LogWriter::open(directory, Arc::new(watch::channel(0).0)).unwrap()
    }

    async fn entries(directory: &Path, query: LogQuery) -> Vec<LogEntry> {
        let mut reader = LogReader::open(directory, query, None).unwrap();
        let mut entries = Vec::new();
        while let Some(entry) = reader.next().await.unwrap() {
            entries.push(entry);
        }
        entries
    }

    fn text(entries: &[LogEntry]) -> String {
        String::from_utf8(entries.iter().flat_map(|entry| entry.data.clone()).collect()).unwrap()
    }

    #[tokio::test]
    async fn what_a_full_disk_loses_is_noted_once_where_it_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = writer(directory.path());
        log.append(LogStream::Stdout, b"begun\nhal");
        let room = log.fill_its_disk();
        log.append(LogStream::Stdout, b"f a line\n");
        assert_eq!(log.news_of_losses().unwrap().bytes, 9);
        log.append(LogStream::Stderr, &vec![b'x'; LONGEST + 1]);
        log.file = room;
        log.append(LogStream::Stdout, b"on\n");
        log.append(LogStream::Stdout, b"and on\n");
        let lost = 9 + LONGEST as u64 + 1;
        assert_eq!(log.news_of_losses().unwrap().bytes, LONGEST as u64 + 1);
        let noted =
            format!("imp: {lost} bytes of output are missing here: No space left on device (os error 28)\n");
        let all = entries(directory.path(), LogQuery::default()).await;
        assert_eq!(text(&all), format!("begun\nhal\n{noted}on\nand on\n"));
        let places: Vec<_> = all.iter().map(|entry| (entry.stream, entry.offset, entry.end())).collect();
        let (on, end) = (9 + lost, 9 + lost + 3);
        let [begun, out, more] =
            [(0, 9), (on, end), (end, end + 7)].map(|(from, to)| (LogStream::Stdout, from, to));
        assert_eq!(places, [begun, (LogStream::Note, on, on), out, more]);
        for (tail, wanted) in [(3, format!("{noted}on\nand on\n")), (2, "on\nand on\n".to_owned())] {
            let query = LogQuery { tail: Some(tail), ..LogQuery::default() };
            assert_eq!(text(&entries(directory.path(), query).await), wanted, "{tail}");
        }
    }

    #[tokio::test]
    async fn a_note_that_was_written_stays_and_data_that_finds_no_room_behind_it_begins_a_new_loss() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = writer(directory.path());
        log.append(LogStream::Stdout, b"hal");
        let room = log.fill_its_disk();
        log.append(LogStream::Stdout, b"f a line\n");
        // With room for exactly the note, which is a line of its own.
        let note = HEADER + "\n".len() + log.losses.note().unwrap().len();
        let sealed = File::from(memfd_create("log", MemfdFlags::ALLOW_SEALING).unwrap());
        let mut bytes = fs::read(file(directory.path(), 0)).unwrap();
        bytes.resize(bytes.len() + note, 0);
        sealed.write_all_at(&bytes, 0).unwrap();
        fcntl_add_seals(&sealed, SealFlags::GROW).unwrap();
        (log.file, log.torn) = (sealed, false);
        log.append(LogStream::Stdout, b"more\n");
        log.file.read_exact_at(&mut bytes, 0).unwrap();
        room.write_all_at(&bytes, 0).unwrap();
        log.file = room;
        log.append(LogStream::Stdout, b"on\n");
        let all = text(&entries(directory.path(), LogQuery::default()).await);
        let lines: Vec<_> = all.lines().map(|line| line.split(": Operation").next().unwrap()).collect();
        let noted = "imp: 9 bytes of output are missing here: No space left on device (os error 28)";
        assert_eq!(lines, ["hal", noted, "imp: 5 bytes of output are missing here", "on"]);
        assert_eq!(recorded(directory.path()).unwrap(), 3 + 9 + 5 + 3);
    }

    #[tokio::test]
    async fn what_is_missing_at_the_end_is_noted_and_is_no_output() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = writer(directory.path());
        log.append(LogStream::Stdout, b"one\n");
        let room = log.fill_its_disk();
        log.append(LogStream::Stdout, b"lost\n");
        log.file = room;
        assert_eq!(log.end().map(|lost| lost.bytes), Some(5));
        assert_eq!(log.end(), None);
        let all = entries(directory.path(), LogQuery::default()).await;
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(text(&all).starts_with("one\nimp: 5 bytes of output are missing here: "), "{all:?}");
        assert_eq!((writer(directory.path()).offset(), recorded(directory.path()).unwrap()), (9, 9));
    }

    #[tokio::test]
    async fn a_disk_that_stays_full_leaves_the_log_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = writer(directory.path());
        log.append(LogStream::Stdout, b"one\n");
        let _room = log.fill_its_disk();
        log.append(LogStream::Stdout, b"lost\n");
        let lost = log.end().unwrap();
        assert_eq!((lost.bytes, lost.why.contains("No space left")), (5, true));
        assert_eq!(text(&entries(directory.path(), LogQuery::default()).await), "one\n");
        assert_eq!(recorded(directory.path()).unwrap(), 4);
    }
}
