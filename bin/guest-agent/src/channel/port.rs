//! A virtio-serial port as a stream.
//!
//! The device is opened once and never closed: on close the driver throws away what the host has already sent. While no
//! host is connected, it reads as ended and polls as hung up without end. tokio's readiness keeps a hang-up for ever and
//! would spin, so the port sits in an epoll instance of its own, edge-triggered, one per direction: that one becomes
//! readable when the port's state has changed, and never hangs up itself.
//!
//! A host that hangs up and comes back before this process runs again leaves no trace in the device: what it says next
//! would end up in a frame of the old conversation that was never finished. So a greeting that arrives by itself ends the
//! old conversation and begins the next. Content of a frame does not arrive by itself: its header comes with it.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use imp_protocol::hello;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that one read of the device gives at the most: a page.
const MOST_AT_ONCE: usize = 4 << 10;
/// Longest time for which the rest of a long message holds everybody up.
const SOON: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };

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

    /// Whether there is something to read, or the host has hung up, within this time.
    fn input_within(&self, time: Timespec) -> io::Result<bool> {
        match rustix::event::poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&time)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
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
    /// The host has begun another conversation.
    over: bool,
}

impl Stream {
    pub(crate) fn new(port: Arc<Port>) -> Self {
        Self { port, over: false }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over {
            return Poll::Ready(Ok(()));
        }
        {
            let mut greeting = self.port.greeting();
            if !greeting.is_empty() {
                let count = greeting.len().min(buffer.remaining());
                buffer.put_slice(greeting.drain(..count).as_slice());
                return Poll::Ready(Ok(()));
            }
        }
        let before = buffer.filled().len();
        let mut last = 0;
        // A large buffer is neither cleared as a whole nor handed on with one page in it.
        while buffer.remaining() > 0 {
            let page = buffer.initialize_unfilled_to(buffer.remaining().min(MOST_AT_ONCE));
            match rustix::io::read(&self.port.device, &mut *page) {
                // Nothing read is the end: the host has hung up.
                Ok(0) => break,
                Ok(count) if page.get(..count).is_some_and(hello::is_greeting) => {
                    self.port.greeting().extend_from_slice(page.get(..count).unwrap_or_default());
                    self.over = true;
                    break;
                }
                Ok(count) => {
                    buffer.advance(count);
                    last = count;
                }
                Err(Errno::INTR) => {}
                // A full page says that more is on its way. Waiting for it here costs one system call; through the reactor it
                // costs several and two changes of tasks, for each page.
                Err(Errno::AGAIN) if last == MOST_AT_ONCE && self.port.input_within(SOON)? => {}
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
        loop {
            match rustix::io::write(&self.port.device, bytes) {
                Ok(count) => return Poll::Ready(Ok(count)),
                Err(Errno::AGAIN) => ready!(self.port.output.poll_change(context))?,
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
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

    #[tokio::test]
    async fn a_greeting_by_itself_ends_a_conversation_and_begins_the_next() {
        let (host, port) = port();
        let mut old = Stream::new(Arc::clone(&port));
        let mut host = tokio::net::UnixStream::from_std(host).unwrap();
        let greeting = b"\nIMP-HOST 1 1 00000000000000ff\n";
        host.write_all(b"half a frame, then with its header: \nIMP-HOST 1 1 0000000000000001\n")
            .await
            .unwrap();
        let mut read = vec![0; 1 << 10];
        assert_eq!(old.read(&mut read).await.unwrap(), 67);
        host.write_all(greeting).await.unwrap();
        assert_eq!(old.read(&mut read).await.unwrap(), 0);
        assert_eq!(old.read(&mut read).await.unwrap(), 0);
        drop(old);
        let mut new = Stream::new(port);
        for byte in greeting {
            assert_eq!(new.read_u8().await.unwrap(), *byte);
        }
        host.write_all(b"PRI").await.unwrap();
        assert_eq!(new.read(&mut read).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn a_host_that_has_hung_up_is_waited_for_without_spinning() {
        let (host, port) = port();
        port.host().await.unwrap();
        drop(host);
        let mut rest = Vec::new();
        Stream::new(Arc::clone(&port)).read_to_end(&mut rest).await.unwrap();
        let mut wait = std::pin::pin!(port.host());
        // The hang-up itself is one change; after it nothing wakes this task any more.
        let polls = std::cell::Cell::new(0);
        let waiting = std::future::poll_fn(|context| {
            polls.set(polls.get() + 1);
            std::future::Future::poll(wait.as_mut(), context)
        });
        assert!(tokio::time::timeout(std::time::Duration::from_millis(50), waiting).await.is_err());
        assert!(polls.get() < 5, "polled {} times", polls.get());
    }
}
