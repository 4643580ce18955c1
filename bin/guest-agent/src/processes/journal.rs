//! The output of one process: written by its pipes, read by the streams that watch it, each from its own position.
//!
//! A reader that is there holds the writer back when it is slow, and so the process itself; nothing is lost for it. With no
//! reader the oldest output makes room for the newest, and a later reader is told how much it missed.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// Chunks smaller than this are joined, so that a process that writes single bytes does not fill memory with bookkeeping.
const SMALL: usize = 4 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Stdout,
    Stderr,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    Data(Source, Bytes),
    /// Bytes that are no longer kept.
    Dropped(u64),
}

/// What stays after all readers have read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    Newest,
}

#[derive(Debug)]
pub(crate) struct Journal {
    state: Mutex<State>,
    changed: Notify,
    capacity: u64,
    keep: Keep,
}

#[derive(Debug, Default)]
struct State {
    chunks: VecDeque<Chunk>,
    /// Position after the last byte.
    end: u64,
    /// Position of each reader.
    readers: BTreeMap<u64, u64>,
    next_reader: u64,
    closed: bool,
}

#[derive(Debug)]
struct Chunk {
    source: Source,
    start: u64,
    bytes: Bytes,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

impl Journal {
    pub(crate) fn new(capacity: u64, keep: Keep) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Notify::new(), capacity, keep })
    }

    /// Appends output, once no reader is more than the capacity behind.
    pub(crate) async fn push(&self, source: Source, bytes: Bytes) {
        self.until(|state| {
            let behind = state.readers.values().min().map_or(0, |slowest| state.end - slowest);
            (behind == 0 || behind + bytes.len() as u64 <= self.capacity).then_some(())
        })
        .await;
        let mut state = self.state();
        state.append(source, bytes);
        state.evict(self.capacity, self.keep);
        drop(state);
        self.changed.notify_waiters();
    }

    /// No more output comes.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_waiters();
    }

    /// Drops what is kept but for what a reader has still to read.
    pub(crate) fn clear(&self) {
        self.state().evict(0, self.keep);
        self.changed.notify_waiters();
    }

    /// A reader that starts at `position` of the whole output, or at its end if that is earlier.
    pub(crate) fn read_from(self: &Arc<Self>, position: u64) -> Reader {
        let mut state = self.state();
        let key = state.next_reader;
        state.next_reader += 1;
        let position = position.min(state.end);
        state.readers.insert(key, position);
        Reader { journal: Arc::clone(self), key }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` finds what it looks for.
    async fn until<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = ready(&mut self.state()) {
                return found;
            }
            changed.await;
        }
    }
}

impl State {
    fn append(&mut self, source: Source, bytes: Bytes) {
        let length = bytes.len() as u64;
        match self.chunks.back_mut() {
            Some(last) if last.source == source && last.bytes.len() + bytes.len() <= SMALL => {
                last.bytes = [&last.bytes[..], &bytes[..]].concat().into();
            }
            _ => self.chunks.push_back(Chunk { source, start: self.end, bytes }),
        }
        self.end += length;
    }

    fn evict(&mut self, capacity: u64, keep: Keep) {
        let read = self.readers.values().min().copied().unwrap_or(self.end);
        let wanted = match keep {
            Keep::Nothing => self.end,
            Keep::Newest => self.end.saturating_sub(capacity),
        };
        while self.chunks.front().is_some_and(|first| first.end() <= read.min(wanted)) {
            self.chunks.pop_front();
        }
    }

    fn next(&mut self, reader: u64) -> Option<Option<Output>> {
        let position = *self.readers.get(&reader)?;
        let first = self.chunks.partition_point(|chunk| chunk.end() <= position);
        let output = match self.chunks.get(first) {
            Some(chunk) if chunk.start > position => Output::Dropped(chunk.start - position),
            Some(chunk) => Output::Data(chunk.source, chunk.bytes.slice((position - chunk.start) as usize..)),
            None if position < self.end => Output::Dropped(self.end - position),
            None => return self.closed.then_some(None),
        };
        let step = match &output {
            Output::Data(_, bytes) => bytes.len() as u64,
            Output::Dropped(bytes) => *bytes,
        };
        self.readers.insert(reader, position + step);
        Some(Some(output))
    }
}

/// One reader's position; while it lives, nothing after it is dropped.
#[derive(Debug)]
pub(crate) struct Reader {
    journal: Arc<Journal>,
    key: u64,
}

impl Reader {
    /// Next output, or nothing when all has been read and no more comes.
    pub(crate) async fn next(&mut self) -> Option<Output> {
        let output = self.journal.until(|state| state.next(self.key)).await;
        self.journal.state().evict(self.journal.capacity, self.journal.keep);
        self.journal.changed.notify_waiters();
        output
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.journal.state();
        state.readers.remove(&self.key);
        state.evict(self.journal.capacity, self.journal.keep);
        drop(state);
        self.journal.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Future, poll_fn};
    use std::task::Poll;

    use super::*;

    fn data(text: &str) -> Output {
        Output::Data(Source::Stdout, Bytes::copy_from_slice(text.as_bytes()))
    }

    async fn push(journal: &Journal, text: &str) {
        journal.push(Source::Stdout, Bytes::copy_from_slice(text.as_bytes())).await;
    }

    #[tokio::test]
    async fn a_late_reader_gets_the_newest_output_and_is_told_what_it_missed() {
        let journal = Journal::new(8 << 10, Keep::Newest);
        for _ in 0..5 {
            push(&journal, &"x".repeat(SMALL)).await;
        }
        journal.close();
        let mut reader = journal.read_from(0);
        assert_eq!(reader.next().await, Some(Output::Dropped(3 * SMALL as u64)));
        assert_eq!(reader.next().await, Some(data(&"x".repeat(SMALL))));
        assert_eq!(reader.next().await, Some(data(&"x".repeat(SMALL))));
        assert_eq!(reader.next().await, None);
    }

    #[tokio::test]
    async fn a_reader_continues_in_the_middle_of_a_chunk() {
        let journal = Journal::new(1 << 20, Keep::Newest);
        push(&journal, "abc").await;
        push(&journal, "def").await;
        let mut reader = journal.read_from(4);
        assert_eq!(reader.next().await, Some(data("ef")));
        push(&journal, "g").await;
        assert_eq!(reader.next().await, Some(data("g")));
    }

    #[tokio::test]
    async fn a_slow_reader_holds_the_writer_back_until_it_reads_or_leaves() {
        let journal = Journal::new(SMALL as u64, Keep::Nothing);
        let mut reader = journal.read_from(0);
        push(&journal, &"a".repeat(SMALL)).await;
        let mut writer = pin!(push(&journal, "b"));
        assert!(poll_fn(|context| Poll::Ready(writer.as_mut().poll(context).is_pending())).await);
        assert_eq!(reader.next().await, Some(data(&"a".repeat(SMALL))));
        writer.await;
        push(&journal, &"c".repeat(SMALL - 1)).await;
        let mut writer = pin!(push(&journal, "d"));
        assert!(poll_fn(|context| Poll::Ready(writer.as_mut().poll(context).is_pending())).await);
        drop(reader);
        writer.await;
        assert!(journal.state().chunks.is_empty());
    }

    #[tokio::test]
    async fn single_bytes_are_joined() {
        let journal = Journal::new(1 << 20, Keep::Newest);
        for _ in 0..3 * SMALL {
            push(&journal, "x").await;
        }
        assert_eq!(journal.state().chunks.len(), 3);
    }
}
