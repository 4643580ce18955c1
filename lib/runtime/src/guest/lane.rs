//! The lane of a VM, greeted and ready for one call: see `imp_protocol::lane`.

use std::time::Duration;

use imp_protocol::hello::{self, Versions};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
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
    _guest: GuestHold,
    _only: OwnedSemaphorePermit,
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
                Ok(Ok(_)) => return Ok(Some(Self { stream, number, _guest: guest, _only: only })),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "no lane");
                    return Ok(None);
                }
                Err(_) => {}
            }
        }
        Ok(None)
    }
}
