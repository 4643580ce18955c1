//! Signals to this command: caught once, for as long as it has something to finish.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that a program may want to have; the rest keep their meaning for this command.
pub(crate) struct Interrupts(Vec<(SignalKind, Signal)>);

impl Interrupts {
    /// From here on no signal ends this command by itself: whoever waits for something waits for these, too.
    pub(crate) fn catch() -> anyhow::Result<Self> {
        let kinds = [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
        ];
        let catch = |kind| Ok((kind, signal(kind).context("cannot receive signals")?));
        Ok(Self(kinds.into_iter().map(catch).collect::<anyhow::Result<_>>()?))
    }

    /// Safe to call off: a signal that has come is not lost.
    pub(crate) async fn next(&mut self) -> SignalKind {
        poll_fn(|context| {
            for (kind, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready(*kind);
                }
            }
            Poll::Pending
        })
        .await
    }
}

impl Interrupts {
    /// Waits for the end of what must not be called off half way, and tells which signal came first meanwhile.
    pub(crate) async fn after<T>(&mut self, work: impl Future<Output = T>) -> (T, Option<SignalKind>) {
        let mut work = pin!(work);
        let mut first = None;
        loop {
            tokio::select! {
                // So that one that came before the end is not told after it.
                biased;
                kind = self.next() => drop(first.get_or_insert(kind)),
                done = &mut work => return (done, first),
            }
        }
    }
}

/// The exit status of a command that a signal ended.
pub(crate) fn exit_status(kind: SignalKind) -> u8 {
    number(kind).saturating_add(128)
}

pub(super) fn number(kind: SignalKind) -> u8 {
    u8::try_from(kind.as_raw_value()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_signal_comes_into_goes_on_to_its_end() {
        let kind = SignalKind::user_defined2();
        let mut interrupts = Interrupts::catch().unwrap();
        let mut came = signal(kind).unwrap();
        let work = async {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR2).unwrap();
            came.recv().await;
            tokio::task::yield_now().await;
            "done"
        };
        assert_eq!(interrupts.after(work).await, ("done", Some(kind)));
        assert_eq!(interrupts.after(async { "done" }).await, ("done", None));
    }
}
