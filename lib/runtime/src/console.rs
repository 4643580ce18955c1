//! A guest's console on disk: the last part of it, bounded, whatever the guest writes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

mod sign;

pub(crate) use sign::Sign;

/// Size at which a file is full; there are two, the older is dropped.
const FILE: u64 = 256 << 10;
/// Longest tail that is searched for last lines.
const TAIL: u64 = 16 << 10;

/// Writes a console down as long as it lives; stops when it is dropped.
pub(crate) struct Recorder {
    finished: watch::Receiver<()>,
    signs: watch::Receiver<Option<Sign>>,
    _task: AbortOnDropHandle<()>,
}

impl Recorder {
    pub(crate) fn start(
        stream: impl AsyncRead + Unpin + Send + 'static,
        now: PathBuf,
        earlier: PathBuf,
    ) -> Self {
        let (sender, finished) = watch::channel(());
        let (reader, signs) = sign::Reader::new();
        let task = tokio::spawn(async move {
            let _sender = sender;
            if let Err(error) = record(stream, reader, &now, &earlier).await {
                tracing::warn!(path = %now.display(), %error, "a console is no longer written down");
            }
        });
        Self { finished, signs, _task: AbortOnDropHandle::new(task) }
    }

    /// The last that the kernel said of its end; it changes as the console is read.
    pub(crate) fn signs(&self) -> watch::Receiver<Option<Sign>> {
        self.signs.clone()
    }

    /// Waits until the console has been closed and all of it is in its file.
    pub(crate) async fn finished(&self) {
        let mut finished = self.finished.clone();
        while finished.changed().await.is_ok() {}
    }
}

async fn record(
    mut stream: impl AsyncRead + Unpin,
    mut signs: sign::Reader,
    now: &Path,
    earlier: &Path,
) -> io::Result<()> {
    let mut file = None;
    let mut buffer = vec![0; 4 << 10];
    loop {
        let count = stream.read(&mut buffer).await?;
        let Some(data) = buffer.get(..count).filter(|data| !data.is_empty()) else { return Ok(()) };
        signs.read(data);
        // A full disk must not stop the guest: its console is read on, and what cannot be written is lost.
        if let Err(error) = append(&mut file, data, now, earlier) {
            tracing::debug!(path = %now.display(), %error, "console output lost");
            file = None;
        }
    }
}

fn append(file: &mut Option<(File, u64)>, data: &[u8], now: &Path, earlier: &Path) -> io::Result<()> {
    let (open, size) = match file {
        Some((open, size)) if *size < FILE => (open, size),
        slot => {
            if slot.is_some() {
                fs::rename(now, earlier)?;
            }
            let open = OpenOptions::new().create(true).append(true).open(now)?;
            let size = open.metadata()?.len();
            let (open, size) = slot.insert((open, size));
            (open, size)
        }
    };
    open.write_all(data)?;
    *size += data.len() as u64;
    Ok(())
}

/// The last lines, oldest first, without control characters.
pub(crate) fn last_lines(now: &Path, earlier: &Path, count: usize) -> Vec<String> {
    let mut text = tail(earlier);
    text.extend(tail(now));
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.chars().filter(|c| !c.is_control() || *c == '\t').collect::<String>())
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines.get(lines.len().saturating_sub(count)..).unwrap_or_default().to_vec()
}

fn tail(path: &Path) -> Vec<u8> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(TAIL);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    // A console that nobody wrote to has no file.
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_guest_that_floods_its_console_leaves_two_bounded_files_and_its_last_words() {
        let directory = tempfile::tempdir().unwrap();
        let (now, earlier) = (directory.path().join("now"), directory.path().join("earlier"));
        let (mut guest, host) = tokio::io::duplex(1 << 12);
        let recorder = Recorder::start(host, now.clone(), earlier.clone());
        for _ in 0..100 {
            guest.write_all(&[b'x'; 32 << 10]).await.unwrap();
        }
        guest.write_all(b"\nlast\x1b[0m words\n").await.unwrap();
        drop(guest);
        recorder.finished().await;
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(size(&now) <= FILE + (4 << 10) && size(&earlier) <= FILE + (4 << 10));
        assert_eq!(last_lines(&now, &earlier, 1), ["last[0m words"]);
    }

    #[test]
    fn a_console_without_a_file_has_no_lines() {
        assert!(last_lines(Path::new("/nonexistent/a"), Path::new("/nonexistent/b"), 5).is_empty());
    }
}
