//! How far a host may be ahead of a process that does not read its input.

use bytes::Bytes;
use tokio::sync::watch;

/// Bytes that a host may have sent without the process having taken them.
pub(crate) const WINDOW: u32 = 1 << 20;

/// The input of one stream, as far as its process has taken it.
#[derive(Debug)]
pub(crate) struct Pace {
    sent: u64,
    taken: watch::Sender<u64>,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { sent: 0, taken: watch::Sender::new(0) }
    }

    /// All bytes that were taken by now, again and again.
    pub(crate) fn taken(&self) -> watch::Receiver<u64> {
        self.taken.subscribe()
    }

    /// The next part of the input. Waits where a host that keeps no pace is too far ahead.
    pub(crate) async fn portion(&mut self, bytes: Bytes) -> Portion {
        let sent = self.sent;
        let mut taken = self.taken.subscribe();
        // The sender is in `self`: it does not go away.
        let _ = taken.wait_for(|taken| sent.saturating_sub(*taken) < u64::from(WINDOW)).await;
        self.sent += bytes.len() as u64;
        Portion { bytes, taken: self.taken.clone() }
    }
}

/// A part of the input that counts as taken when it is dropped, written or not.
#[derive(Debug)]
pub(crate) struct Portion {
    bytes: Bytes,
    taken: watch::Sender<u64>,
}

impl Portion {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Portion {
    fn drop(&mut self) {
        let length = self.bytes.len() as u64;
        self.taken.send_modify(|taken| *taken += length);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    #[tokio::test]
    async fn input_waits_where_the_process_is_a_window_behind_and_goes_on_when_some_is_taken() {
        let mut pace = Pace::new();
        let taken = pace.taken();
        let whole = pace.portion(vec![0; WINDOW as usize].into()).await;
        {
            let mut next = pin!(pace.portion(Bytes::from_static(b"x")));
            assert!(poll_fn(|context| Poll::Ready(next.as_mut().poll(context).is_pending())).await);
            drop(whole);
            drop(next.await);
        }
        assert_eq!(*taken.borrow(), u64::from(WINDOW) + 1);
    }
}
