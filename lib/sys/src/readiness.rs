//! Descriptors that tokio watches.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a descriptor until it can be read. Panics outside a tokio runtime.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays open and the same until it is dropped, and whoever holds the result gets at it
    // by shared reference or takes it out, which ends the watch first. `AsyncFd::get_mut` could replace it: then the old
    // one is closed under a watch on a number, which the kernel ends with the last descriptor of its file; a reused
    // number costs a missed or a needless wake-up, never memory.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(|error| error.into_parts().1)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_descriptor_becomes_readable_when_something_was_written() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
        runtime.block_on(async {
            let (reader, mut writer) = io::pipe().expect("a pipe");
            let watched = readable(reader.into()).expect("a watch");
            let waiting =
                tokio::spawn(async move { watched.readable().await.map(|mut ready| ready.retain_ready()) });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            writer.write_all(b"x").expect("room");
            waiting.await.expect("no panic").expect("readable");
        });
    }
}
