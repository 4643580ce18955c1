//! The lane of a VM, greeted and ready for one call: see `imp_protocol::lane`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::hello::{self, Versions};
use imp_protocol::lane;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::GuestHold;
use crate::random;
use crate::vmm::{self, Machine};

/// How long an agent may take to answer, try by try: the call before may still hold the lane, and swallow a greeting, until
/// it learns of its own end. An archive that waits longer goes over the channel sooner.
const ANSWERS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(250), Duration::from_millis(500)];

/// A lane that nobody else is given while this lives.
#[derive(Debug)]
#[non_exhaustive]
pub struct Lane {
    pub stream: UnixStream,
    /// What the agent knows it by.
    pub number: u64,
    guest: GuestHold,
    only: OwnedSemaphorePermit,
}

/// What opens a lane, one call after the other.
pub(crate) struct Lanes {
    pub machine: Arc<dyn Machine>,
    pub guest: GuestHold,
    pub only: Arc<Semaphore>,
}

impl Lanes {
    /// None: there is none now, and a call does without.
    pub(crate) async fn open(&self) -> Option<Lane> {
        let only = Arc::clone(&self.only).try_acquire_owned().ok()?;
        Lane::open(self.machine.as_ref(), self.guest.clone(), only).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "the lane cannot be used");
            None
        })
    }
}

impl Lane {
    /// None: the machine has no lane, or its agent does not answer there.
    pub(crate) async fn open(
        machine: &dyn Machine,
        guest: GuestHold,
        only: OwnedSemaphorePermit,
    ) -> Result<Option<Self>, vmm::Error> {
        let Some(mut stream) = machine.connect_lane().await? else { return Ok(None) };
        for patience in ANSWERS {
            let number = random::number();
            match timeout(patience, hello::greet(&mut stream, Versions::OURS, number)).await {
                Ok(Ok(_)) => return Ok(Some(Self { stream, number, guest, only })),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "no lane");
                    return Ok(None);
                }
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// For threads that may block, with what keeps it from others.
    pub(crate) fn into_blocking(self) -> io::Result<(lane::Lane, impl Sized)> {
        let lane = lane::Lane::of_owner(self.stream.into_std()?, self.number)?;
        Ok((lane, (self.guest, self.only)))
    }
}
