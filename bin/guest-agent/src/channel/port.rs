//! A virtio-serial port as a stream.
//!
//! The device is opened once and never closed: on close the driver throws away what the host has already sent. While no
//! host is connected, it reads as ended and polls as hung up without end. tokio's readiness keeps a hang-up for ever and
//! would spin, so the port sits in an epoll instance of its own, edge-triggered, one per direction: that one becomes
//! readable when the port's state has changed, and never hangs up itself.
//!
//! A host that hangs up and comes back before this process runs again leaves no trace in the device: what it says next
//! would end up in a frame of the old conversation that was never finished. So its greeting, which `frames` tells from
//! content, ends the old conversation and begins the next.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use imp_sys::reading;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::frames::{Frames, Verdict};

/// Bytes that one read of the device gives at the most: a page.
const MOST_AT_ONCE: usize = 4 << 10;
/// Bytes that one write to the device takes at the most.
const MOST_IN_A_WRITE: usize = 32 << 10;

#[derive(Debug)]
pub(crate) struct Port {
    device: OwnedFd,
    input: Changes,
    output: Changes,
    /// The greeting of the next conversation, read by the one before.
    greeting: Mutex<Vec<u8>>,
}

impl Port {
    /// `device` must be non-blocking.
    pub(crate) fn new(device: OwnedFd) -> io::Result<Self> {
        let input = Changes::of(&device, EventFlags::IN)?;
        let output = Changes::of(&device, EventFlags::OUT)?;
        Ok(Self { device, input, output, greeting: Mutex::default() })
    }

    /// What one read of the device gives; nothing when the host has hung up.
    pub(crate) fn poll_read(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match reading::behind_filled(&self.device, buffer, MOST_AT_ONCE) {
                Ok(count) => {
                    buffer.initialize_unfilled_to(count);
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => ready!(self.input.poll_change(context))?,
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    pub(crate) fn poll_write(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match rustix::io::write(&self.device, bytes) {
                Ok(count) => return Poll::Ready(Ok(count)),
                Err(Errno::AGAIN) => ready!(self.output.poll_change(context))?,
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    fn greeting(&self) -> MutexGuard<'_, Vec<u8>> {
        self.greeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a host is connected.
    pub(crate) async fn host(&self) -> io::Result<()> {
        std::future::poll_fn(|context| {
            loop {
                let mut polled = [PollFd::new(&self.device, PollFlags::IN)];
                rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
                if !polled.iter().any(|polled| polled.revents().contains(PollFlags::HUP)) {
                    return Poll::Ready(Ok(()));
                }
                ready!(self.input.poll_change(context))?;
            }
        })
        .await
    }
}

/// One conversation over the port.
#[derive(Debug)]
pub(crate) struct Stream {
    port: Arc<Port>,
    frames: Frames,
    /// A read that may be a greeting.
    held: Vec<u8>,
    /// What was read and did not fit.
    rest: BytesMut,
    /// The host has begun another conversation.
    over: bool,
    /// The beginning of a frame with its header before it: the device takes only one piece of memory at a time.
    joined: Vec<u8>,
}

impl Stream {
    /// Begins with the greeting that ended the conversation before, if one did.
    pub(crate) fn new(port: Arc<Port>) -> Self {
        let rest = BytesMut::from(&*std::mem::take(&mut *port.greeting()));
        Self { port, frames: Frames::default(), held: Vec::new(), rest, over: false, joined: Vec::new() }
    }

    /// One read of the device, a whole page if there is one, so that it can be judged.
    fn read_device(&mut self, buffer: &mut ReadBuf<'_>) -> Result<Read, Errno> {
        if buffer.remaining() >= MOST_AT_ONCE {
            let count = reading::behind_filled(&self.port.device, buffer, MOST_AT_ONCE)?;
            if count == 0 {
                return Ok(Read::End);
            }
            let page = buffer.initialize_unfilled_to(count);
            match self.frames.judge(page) {
                Verdict::Content if self.held.is_empty() => buffer.advance(count),
                verdict => {
                    let page = page.to_vec();
                    self.follow(verdict, &page);
                }
            }
            return Ok(Read::Some);
        }
        let mut page = Vec::with_capacity(MOST_AT_ONCE);
        let count = reading::behind_content(&self.port.device, &mut page, MOST_AT_ONCE)?;
        if count == 0 {
            return Ok(Read::End);
        }
        let verdict = self.frames.judge(&page);
        self.follow(verdict, &page);
        Ok(Read::Some)
    }

    fn follow(&mut self, verdict: Verdict, page: &[u8]) {
        match verdict {
            Verdict::Content => {
                self.rest.extend_from_slice(&std::mem::take(&mut self.held));
                self.rest.extend_from_slice(page);
            }
            Verdict::Held => self.held.extend_from_slice(page),
            Verdict::Greeting => {
                self.port.greeting().extend_from_slice(page);
                self.over = true;
            }
        }
    }
}

/// What a read of the device gave.
enum Read {
    /// Bytes, of whatever kind.
    Some,
    /// The host has hung up.
    End,
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        while buffer.remaining() > 0 && !self.over {
            if !self.rest.is_empty() {
                let count = self.rest.len().min(buffer.remaining());
                buffer.put_slice(&self.rest.split_to(count));
                continue;
            }
            match self.read_device(buffer) {
                Ok(Read::Some) => {}
                Ok(Read::End) => break,
                Err(Errno::INTR) => {}
                // What has been read is told first; the next call meets the same again.
                Err(_) if buffer.filled().len() > before => break,
                Err(Errno::AGAIN) => ready!(self.port.input.poll_change(context))?,
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.port.poll_write(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut parts = parts.iter().filter(|part| !part.is_empty()).peekable();
        let Some(first) = parts.next() else { return Poll::Ready(Ok(0)) };
        if first.len() >= MOST_IN_A_WRITE || parts.peek().is_none() {
            return self.port.poll_write(context, first);
        }
        let Self { port, joined, .. } = &mut *self;
        joined.clear();
        joined.extend_from_slice(first);
        for part in parts {
            let count = part.len().min(MOST_IN_A_WRITE - joined.len());
            joined.extend_from_slice(part.get(..count).unwrap_or_default());
        }
        port.poll_write(context, joined)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Tells that something has changed in one direction of a device.
#[derive(Debug)]
struct Changes(AsyncFd<OwnedFd>);

impl Changes {
    fn of(device: &OwnedFd, direction: EventFlags) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, device, EventData::new_u64(0), direction | EventFlags::ET)?;
        Ok(Self(crate::readiness::readable(epoll)?))
    }

    /// Ready means: try again. It may be ready without a change, but not again and again.
    fn poll_change(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut ready = ready!(self.0.poll_read_ready(context))?;
        let mut events = Vec::with_capacity(1);
        // Takes the event, so that the next one is news.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), Some(&now))?;
        ready.clear_ready();
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A socket stands in for the device: it blocks, fills up and hangs up in the same way.
    fn port() -> (UnixStream, Arc<Port>) {
        let (host, guest) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        host.set_nonblocking(true).unwrap();
        (host, Arc::new(Port::new(guest.into()).unwrap()))
    }

    #[tokio::test]
    async fn bytes_go_both_ways_through_a_full_device() {
        let (host, port) = port();
        let mut host = tokio::net::UnixStream::from_std(host).unwrap();
        let (mut from_host, mut to_host) = host.split();
        let (mut reader, mut writer) = tokio::io::split(Stream::new(port));
        let sent = vec![7_u8; 4 << 20];
        let (mut there, mut back) = (vec![0; sent.len()], vec![0; sent.len()]);
        let (a, b, c, d) = tokio::join!(
            writer.write_all(&sent),
            from_host.read_exact(&mut there),
            to_host.write_all(&sent),
            reader.read_exact(&mut back),
        );
        a.unwrap();
        b.unwrap();
        c.unwrap();
        d.unwrap();
        assert!(there == sent && back == sent);
    }

    const GREETING: &[u8] = b"\nIMP-HOST 1 1 00000000000000ff\n";
    /// A preface and the header of a frame of 100 bytes.
    const BEGUN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x64\0\0\0\0\0\x01";

    /// Whether a read finds nothing. The first look is at the device itself, in which all is that was sent.
    async fn nothing_of(stream: &mut Stream, buffer: &mut [u8]) -> bool {
        tokio::select! {
            biased;
            _ = stream.read(buffer) => false,
            () = std::future::ready(()) => true,
        }
    }

    #[tokio::test]
    async fn a_greeting_ends_a_conversation_and_begins_the_next() {
        let (host, port) = port();
        let mut old = Stream::new(Arc::clone(&port));
        let mut host = tokio::net::UnixStream::from_std(host).unwrap();
        let mut read = vec![0; 8 << 10];
        host.write_all(BEGUN).await.unwrap();
        assert_eq!(old.read(&mut read).await.unwrap(), BEGUN.len());
        // In the middle of the frame nobody knows yet.
        host.write_all(b"\nIMP-HOST 1 1 0000000000000001\n").await.unwrap();
        assert!(nothing_of(&mut old, &mut read).await);
        host.write_all(GREETING).await.unwrap();
        assert_eq!(old.read(&mut read).await.unwrap(), 0);
        assert_eq!(old.read(&mut read).await.unwrap(), 0);
        drop(old);
        let mut new = Stream::new(port);
        for byte in GREETING {
            assert_eq!(new.read_u8().await.unwrap(), *byte);
        }
        host.write_all(b"PRI").await.unwrap();
        assert_eq!(new.read(&mut read).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn content_that_looks_like_a_greeting_arrives_whole_in_buffers_of_any_size() {
        for size in [1, 10, 100, 8 << 10] {
            let (host, port) = port();
            let mut stream = Stream::new(Arc::clone(&port));
            let mut host = tokio::net::UnixStream::from_std(host).unwrap();
            let mut sent = Vec::new();
            let mut read = Vec::new();
            let rest = vec![b'x'; 100 - GREETING.len()];
            for part in [BEGUN, GREETING, rest.as_slice()] {
                host.write_all(part).await.unwrap();
                sent.extend_from_slice(part);
                // What is not held back is read before the next part comes.
                while read.len() < sent.len() && part != GREETING {
                    let mut buffer = vec![0; size];
                    let count = stream.read(&mut buffer).await.unwrap();
                    assert_ne!(count, 0, "the conversation has ended");
                    read.extend_from_slice(&buffer[..count]);
                }
                if part == GREETING {
                    let mut buffer = vec![0; size];
                    assert!(nothing_of(&mut stream, &mut buffer).await);
                }
            }
            assert_eq!(read, sent);
        }
    }

    #[tokio::test]
    async fn a_header_and_its_payload_go_to_the_device_in_one_piece() {
        let (host, port) = port();
        let mut stream = Stream::new(port);
        let payload = vec![7; 40 << 10];
        let parts = [io::IoSlice::new(b"header"), io::IoSlice::new(&payload)];
        assert_eq!(stream.write_vectored(&parts).await.unwrap(), MOST_IN_A_WRITE);
        let parts = [io::IoSlice::new(b"end"), io::IoSlice::new(&[])];
        assert_eq!(stream.write_vectored(&parts).await.unwrap(), 3);
        let mut host = tokio::net::UnixStream::from_std(host).unwrap();
        let mut sent = vec![0; MOST_IN_A_WRITE + 3];
        host.read_exact(&mut sent).await.unwrap();
        let expected = [b"header", &payload[..MOST_IN_A_WRITE - 6], b"end"].concat();
        assert!(sent == expected);
    }

    #[tokio::test]
    async fn a_host_that_has_hung_up_is_waited_for_without_spinning() {
        let (host, port) = port();
        port.host().await.unwrap();
        drop(host);
        let mut rest = Vec::new();
        Stream::new(Arc::clone(&port)).read_to_end(&mut rest).await.unwrap();
        // The hang-up itself is one change; after it nothing wakes the task that waits any more.
        let polls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = Arc::clone(&polls);
        let waiting = tokio::spawn(async move {
            let mut wait = std::pin::pin!(port.host());
            std::future::poll_fn(|context| {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                std::future::Future::poll(wait.as_mut(), context)
            })
            .await
        });
        // Enough turns for the runtime to look at its descriptors many times.
        for _ in 0..5_000 {
            tokio::task::yield_now().await;
        }
        assert!(!waiting.is_finished());
        let polls = polls.load(std::sync::atomic::Ordering::Relaxed);
        assert!((1..5).contains(&polls), "polled {polls} times");
        waiting.abort();
    }
}
