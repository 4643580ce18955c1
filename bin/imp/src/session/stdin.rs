//! What the user types or pipes in, on its way to the program: never further ahead of it than the agent allows, so that
//! a signal or a new size overtakes what the program does not read.

use std::io::Read;
use std::num::NonZeroU32;

use bytes::{Bytes, BytesMut};
use imp_protocol::process::Input;
use tokio::sync::{mpsc, watch};

use super::{Aside, ProgramInput, Stdin};
use crate::terminal::{DetachFilter, Typed};

/// Largest piece of input sent at once.
const CHUNK: usize = 32 << 10;

/// How much input the program may be sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// Absent: the program has not started.
    pub(super) window: Option<Window>,
    /// Bytes that it has taken.
    pub(super) taken: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Window {
    /// The agent does not say what was taken.
    Unknown,
    Bytes(u64),
}

impl From<Option<NonZeroU32>> for Window {
    fn from(window: Option<NonZeroU32>) -> Self {
        window.map_or(Self::Unknown, |bytes| Self::Bytes(bytes.get().into()))
    }
}

impl Room {
    /// Bytes that may be sent now when so many have been.
    fn after(self, sent: u64) -> usize {
        match self.window {
            None => 0,
            Some(Window::Unknown) => CHUNK,
            Some(Window::Bytes(window)) => {
                let left = window.saturating_sub(sent.saturating_sub(self.taken));
                usize::try_from(left).unwrap_or(CHUNK).min(CHUNK)
            }
        }
    }
}

/// Sends the input and, if the program is to have it, the end of it.
pub(super) async fn send(
    input: ProgramInput,
    stdin: Stdin,
    mut filter: Option<DetachFilter>,
    asides: mpsc::Sender<Aside>,
    mut room: watch::Receiver<Room>,
) {
    let mut pieces = read();
    let mut pending = BytesMut::new();
    let (mut sent, mut ended) = (0, false);
    loop {
        tokio::select! {
            piece = pieces.recv(), if !ended && pending.len() < CHUNK => match piece {
                None => ended = true,
                Some(bytes) => match typed(&mut filter, bytes) {
                    Typed::Pass(bytes) => pending.extend_from_slice(&bytes),
                    Typed::Detach(bytes) => {
                        pending.extend_from_slice(&bytes);
                        // What the program does not take now is not waited for.
                        let now = pending.len().min(room.borrow().after(sent));
                        if now > 0 {
                            input.send(Input::Stdin(pending.split_to(now).freeze())).await;
                        }
                        let _ = asides.send(Aside::Detached).await;
                        return;
                    }
                },
            },
            allowed = allowed(&mut room, sent), if !pending.is_empty() => {
                let part = pending.split_to(pending.len().min(allowed)).freeze();
                sent += part.len() as u64;
                if !input.send(Input::Stdin(part)).await {
                    return;
                }
            }
            else => break,
        }
    }
    if stdin == Stdin::Sent {
        input.send(Input::CloseStdin).await;
    }
}

fn typed(filter: &mut Option<DetachFilter>, bytes: Bytes) -> Typed {
    match filter {
        None => Typed::Pass(bytes.into()),
        Some(filter) => filter.typed(&bytes),
    }
}

/// Waits until something may be sent.
async fn allowed(room: &mut watch::Receiver<Room>, sent: u64) -> usize {
    match room.wait_for(|room| room.after(sent) > 0).await.map(|room| room.after(sent)) {
        Ok(allowed) => allowed,
        // The session is over, and this task with it.
        Err(_) => std::future::pending().await,
    }
}

/// Stdin in pieces, read by a thread of its own: a read of a terminal cannot be called off.
fn read() -> mpsc::Receiver<Bytes> {
    let (pieces, receiver) = mpsc::channel::<Bytes>(4);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let bytes = Bytes::copy_from_slice(buffer.get(..read).unwrap_or_default());
            if pieces.blocking_send(bytes).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_sent_before_the_start_and_never_more_than_the_window_ahead() {
        let room = |window, taken| Room { window, taken };
        assert_eq!(room(None, 0).after(0), 0);
        assert_eq!(room(Some(Window::Unknown), 0).after(1 << 30), CHUNK);
        let window = Some(Window::Bytes(40 << 10));
        assert_eq!(room(window, 0).after(0), CHUNK);
        assert_eq!(room(window, 0).after(30 << 10), 10 << 10);
        assert_eq!(room(window, 0).after(40 << 10), 0);
        assert_eq!(room(window, 7).after(40 << 10), 7);
        // What no agent of ours says.
        assert_eq!(room(window, u64::MAX).after(1), CHUNK);
    }
}
