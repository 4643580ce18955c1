//! Moves bytes between a process's pipes, or its terminal, and the streams of the host.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};

use super::journal::{Journal, Source};
use super::process::Input;

/// Bytes read at once: what a pipe holds.
const READ: usize = 64 << 10;
/// Most bytes that are drained after the main process's end: no pipe holds more, and a background child could write for
/// ever.
const MOST_DRAINED: usize = 1 << 20;
/// What a terminal takes for the end of input.
const END_OF_TRANSMISSION: u8 = 4;

/// The agent's end of an output pipe or of a terminal, which reads the same. It must be non-blocking.
pub(crate) fn reader(fd: OwnedFd) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_file_unchecked(File::from(fd))
}

/// The agent's end of an input pipe or of a terminal. It must be non-blocking.
pub(crate) fn writer(fd: OwnedFd) -> io::Result<pipe::Sender> {
    pipe::Sender::from_file_unchecked(File::from(fd))
}

/// Copies output to the journal until its end, or until `drain` says that the main process has ended and nothing is left.
/// After that a background child may go on writing: its output is thrown away, so that it is not killed by SIGPIPE.
pub(crate) async fn output(
    pipe: pipe::Receiver,
    source: Source,
    journal: Arc<Journal>,
    mut drain: watch::Receiver<bool>,
    done: oneshot::Sender<()>,
) {
    let mut buffer = BytesMut::new();
    let mut left = MOST_DRAINED;
    let end = loop {
        buffer.reserve(READ);
        match pipe.try_read_buf(&mut buffer) {
            Ok(0) => break Ended::Closed,
            Ok(count) => {
                journal.push(source, buffer.split().freeze()).await;
                if *drain.borrow() {
                    left = left.saturating_sub(count);
                    if left == 0 {
                        break Ended::Drained;
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if *drain.borrow() {
                    break Ended::Drained;
                }
                // An idle process holds no buffer.
                buffer = BytesMut::new();
                tokio::select! {
                    ready = pipe.readable() => if ready.is_err() { break Ended::Closed },
                    changed = drain.changed() => if changed.is_err() { break Ended::Closed },
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A terminal that all processes have closed reads as an I/O error.
            Err(_) => break Ended::Closed,
        }
    };
    drop((done, journal, drain));
    if let Ended::Drained = end {
        throw_away(pipe, buffer).await;
    }
}

enum Ended {
    Closed,
    Drained,
}

async fn throw_away(pipe: pipe::Receiver, mut buffer: BytesMut) {
    loop {
        buffer.clear();
        buffer.reserve(READ);
        match pipe.try_read_buf(&mut buffer) {
            Ok(0) => return,
            Ok(_) => tokio::task::yield_now().await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                buffer = BytesMut::new();
                if pipe.readable().await.is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// How a process is told that no more input comes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Close,
    Character,
}

/// Copies input to the process until it is closed on either side.
pub(crate) async fn input(mut pipe: pipe::Sender, mut inputs: mpsc::UnboundedReceiver<Input>, end: End) {
    while let Some(input) = inputs.recv().await {
        let written = match (input, end) {
            // Taken when it is dropped: once it is written.
            (Input::Data(portion), _) => pipe.write_all(portion.bytes()).await,
            (Input::End, End::Character) => pipe.write_all(&[END_OF_TRANSMISSION]).await,
            (Input::End, End::Close) => return,
        };
        if written.is_err() {
            return;
        }
    }
}
