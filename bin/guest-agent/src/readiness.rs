//! Descriptors that tokio watches.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a descriptor until it can be read.
pub(crate) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(
        deprecated,
        reason = "unsound only for types whose descriptor changes or closes; an owned one does neither"
    )]
    AsyncFd::with_interest(fd, Interest::READABLE)
}
