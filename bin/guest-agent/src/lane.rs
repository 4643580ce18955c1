//! The lane, a port beside the channel's: carries the archive of one call at a time, past HTTP/2.
//!
//! ```text
//! quiet ─ a host greets ─► offered under the greeting's number ─ a call names it ─► taken ─ the call ends ─► quiet
//! ```
//! Between two greetings only the thread of the call that took the lane reads or writes it. What a host that left has still
//! sent is passed over until the next greeting; a greeting that such a call has swallowed is sent again. Over vsock each host
//! has a stream of its own, which ends with its call.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use imp_protocol::hello::{self, Versions};
use imp_protocol::lane::TAKEN;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tonic::Status;

use crate::channel::{MOST_OVER_VSOCK, Port};

/// Bytes that one read of the port gives at the most.
const PAGE: usize = 4 << 10;
/// How often a thread that waits for the host looks whether its call goes on.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How long a host may take to read the end of an archive and hang up.
const LAST_BYTES: Duration = Duration::from_secs(60);

/// The lane as calls see it.
#[derive(Debug, Default)]
pub(crate) struct Lane(Mutex<Option<Offer>>);

#[derive(Debug)]
struct Offer {
    number: u64,
    device: Arc<OwnedFd>,
    most: usize,
    /// Gets what ends when the lane is given back.
    taker: oneshot::Sender<oneshot::Receiver<()>>,
}

impl Lane {
    /// The lane of this number, for one call that goes on for as long as `goes_on` says so.
    pub(crate) fn take(
        &self,
        number: u64,
        goes_on: impl Fn() -> bool + Send + 'static,
    ) -> Result<Taken, Status> {
        let gone = || Status::aborted("the call's lane is gone: copy again");
        let offer = self.offer().take_if(|offer| offer.number == number).ok_or_else(gone)?;
        let (back, given_back) = oneshot::channel();
        offer.taker.send(given_back).map_err(|_| gone())?;
        Ok(Taken { device: offer.device, most: offer.most, goes_on: Box::new(goes_on), _back: back })
    }

    fn offer(&self) -> MutexGuard<'_, Option<Offer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves hosts until the port fails.
    pub(crate) async fn serve(&self, device: OwnedFd) -> io::Result<()> {
        let device = Arc::new(device);
        loop {
            // Watched only until a call takes it: every page that comes and goes would wake this thread too.
            let port = Port::new(device.try_clone()?)?;
            port.host().await?;
            match self.converse(Stream(port), &device, usize::MAX).await {
                // An error: the call has ended and dropped its side.
                Ok(given_back) => drop(given_back.await),
                Err(hello::Error::Channel(error)) => return Err(error),
                // The host has hung up, or is none that this agent speaks to.
                Err(hello::Error::Closed | hello::Error::Noise | hello::Error::TooOld { .. }) => {}
            }
        }
    }

    /// Serves one host, on a stream that is this host's own.
    pub(crate) async fn serve_stream(&self, mut stream: UnixStream) -> io::Result<()> {
        let device = Arc::new(stream.as_fd().try_clone_to_owned()?);
        match self.converse(&mut stream, &device, MOST_OVER_VSOCK).await {
            Ok(given_back) => {
                // Watched only while no call has it, as a port is.
                let held = stream.into_std()?;
                drop(given_back.await);
                stream = UnixStream::from_std(held)?;
            }
            Err(hello::Error::Channel(error)) => return Err(error),
            Err(hello::Error::Closed | hello::Error::Noise | hello::Error::TooOld { .. }) => return Ok(()),
        }
        // The host has not read all of it before it hangs up: closing the stream now may throw the rest away.
        let hung_up = async { tokio::io::copy(&mut stream, &mut tokio::io::sink()).await };
        // Whether by a reset or in order, it has ended.
        drop(tokio::time::timeout(LAST_BYTES, hung_up).await);
        Ok(())
    }

    /// Answers hosts until a call takes the lane; returns what ends when it is given back.
    async fn converse(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        device: &Arc<OwnedFd>,
        most: usize,
    ) -> Result<oneshot::Receiver<()>, hello::Error> {
        let mut stream = BufReader::with_capacity(PAGE, stream);
        loop {
            let host = hello::answer(&mut stream, Versions::OURS, env!("CARGO_PKG_VERSION")).await?;
            let (taker, taken) = oneshot::channel();
            let number = host.nonce;
            *self.offer() = Some(Offer { number, device: Arc::clone(device), most, taker });
            let taken = tokio::select! {
                biased;
                taken = taken => taken.ok(),
                // Nobody says anything before the lane is taken, but the next host, and one that hangs up.
                _ = stream.fill_buf() => None,
            };
            // A later host's own stays.
            drop(self.offer().take_if(|offer| offer.number == number));
            if let Some(given_back) = taken {
                return Ok(given_back);
            }
        }
    }
}

/// The lane in the hands of one call, for a thread that may block.
pub(crate) struct Taken {
    device: Arc<OwnedFd>,
    /// Bytes of one write.
    most: usize,
    goes_on: Box<dyn Fn() -> bool + Send>,
    /// Dropped with this: the lane is free again.
    _back: oneshot::Sender<()>,
}

impl Taken {
    /// Tells the host that it may begin.
    pub(crate) fn begin(mut self) -> io::Result<Self> {
        self.write_all(&[TAKEN])?;
        Ok(self)
    }

    fn check(&self) -> io::Result<()> {
        if (self.goes_on)() { Ok(()) } else { Err(io::ErrorKind::ConnectionAborted.into()) }
    }

    fn wait(&self, direction: PollFlags) -> io::Result<PollFlags> {
        let mut polled = [PollFd::new(&self.device, direction)];
        match poll(&mut polled, Some(&LOOK)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [polled] = polled;
        Ok(polled.revents())
    }
}

impl Read for Taken {
    /// As much as is there, into all of the buffer: one read of the port gives a page.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut count = 0;
        while let Some(rest) = buffer.get_mut(count..).filter(|rest| !rest.is_empty()) {
            self.check()?;
            match rustix::io::read(&self.device, rest) {
                // The host has hung up.
                Ok(0) => break,
                Ok(more) => count += more,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if count > 0 => break,
                Err(Errno::AGAIN) => drop(self.wait(PollFlags::IN)?),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(count)
    }
}

impl Write for Taken {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.check()?;
            match rustix::io::write(&self.device, bytes.get(..self.most).unwrap_or(bytes)) {
                Ok(count) => return Ok(count),
                Err(Errno::INTR) => {}
                // To the port's driver a host that is gone is like one that does not read.
                Err(Errno::AGAIN) => {
                    if self.wait(PollFlags::OUT)?.contains(PollFlags::HUP) {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The port while no call has it.
struct Stream(Port);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
