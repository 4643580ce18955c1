//! Memory of a running guest: taken back down to a size, and given to it again.
//!
//! ```text
//! wanted ──► the balloon grows or shrinks, as fast as the guest can ──► what was wanted
//!                                                                  └──► nothing more comes: wanted is what there is
//! ```
//!
//! A guest that cannot give what is wanted goes on trying, and takes a processor for it: nobody wants more from it, then.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::{Error, Runtime};
use crate::id::VmId;
use crate::spec::{Balloon, Memory};
use crate::status::{BalloonFacts, State};
use crate::vm::Message;
use crate::vmm::{self, Machine};

/// How long a guest may take for its first page. One that has just begun has yet to load the driver.
const FIRST_PAGE: Duration = Duration::from_secs(20);
/// How long a guest may take for its next page. Under emulation, and when it writes pages to disk first, that is long.
const NEXT_PAGE: Duration = Duration::from_secs(3);
/// Between two looks at the balloon.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum NotReclaimed {
    #[error("it is {state}: only a guest that runs can give memory back")]
    NotRunning { state: State },
    #[error("it has no balloon: VMs that are started with --balloon, in Firecracker, have one")]
    NoBalloon,
    #[error("it was started with {most} of memory: no VM gets more than that")]
    TooMuch { most: Memory },
    #[error(transparent)]
    Machine(Box<dyn std::error::Error + Send + Sync>),
}

impl From<vmm::Error> for NotReclaimed {
    fn from(error: vmm::Error) -> Self {
        match error {
            vmm::Error::NoBalloon => Self::NoBalloon,
            error => Self::Machine(Box::new(error)),
        }
    }
}

impl Runtime {
    /// Whether a new VM can have a balloon here.
    pub fn has_balloons(&self) -> bool {
        self.shared.context.drivers.have_balloons()
    }

    /// Leaves the guest this much of its memory, up to all that it was started with. Returns what it has given back, which is
    /// less than was wanted when it needs it itself: a guest is not made to kill its processes for it. Whenever it runs out of
    /// memory later it takes some of it back, as much as it needs.
    ///
    /// What a VM is counted with on its host stays the same: it may need all of it again.
    pub async fn set_memory(&self, id: &VmId, left: Memory) -> Result<BalloonFacts, Error> {
        let handle = self.handle(id)?;
        let failed = |source| Error::NotReclaimed { id: id.clone(), source };
        // Nobody makes a snapshot meanwhile, nor wants another size.
        let _only = self.quiet(id, &handle).await?;
        let (state, most) = {
            let status = handle.status.borrow();
            (status.state, status.memory)
        };
        if state != State::Running {
            return Err(failed(NotReclaimed::NotRunning { state }));
        }
        let wanted =
            most.bytes().checked_sub(left.bytes()).ok_or_else(|| failed(NotReclaimed::TooMuch { most }))?;
        let (answer, machine) = oneshot::channel();
        self.tell(id, &handle, Message::Machine(answer))?;
        let machine: Arc<dyn Machine> = machine.await.map_err(|_| Error::Ended)?;
        let facts = reclaim(machine.as_ref(), wanted).await.map_err(failed)?;
        self.tell(id, &handle, Message::Balloon(facts))?;
        tracing::info!(vm = %id, wanted_bytes = wanted, given_bytes = facts.given_bytes, "memory is reclaimed");
        Ok(facts)
    }

    /// What the guest has given back by now; none: it has no balloon, or does not run.
    pub async fn balloon(&self, id: &VmId) -> Result<Option<BalloonFacts>, Error> {
        let handle = self.handle(id)?;
        let state = handle.status.borrow().state;
        if state != State::Running || handle.balloon == Balloon::Without {
            return Ok(None);
        }
        let (answer, machine) = oneshot::channel();
        self.tell(id, &handle, Message::Machine(answer))?;
        let Ok(machine) = machine.await else { return Ok(None) };
        let failed = |error: vmm::Error| Error::NotReclaimed { id: id.clone(), source: error.into() };
        machine.balloon().await.map_err(failed)
    }
}

/// What the guest has given, of what is wanted, when no more comes.
async fn reclaim(machine: &dyn Machine, wanted: u64) -> Result<BalloonFacts, NotReclaimed> {
    look(machine).await?;
    machine.inflate(wanted).await?;
    let mut seen = look(machine).await?;
    let (mut moved, mut patience) = (Instant::now(), FIRST_PAGE);
    while seen.given_bytes != wanted && moved.elapsed() < patience {
        sleep(LOOK).await;
        let now = look(machine).await?;
        if now != seen {
            (seen, moved, patience) = (now, Instant::now(), NEXT_PAGE);
        }
    }
    if seen.given_bytes < wanted {
        machine.inflate(seen.given_bytes).await?;
        seen.wanted_bytes = seen.given_bytes;
    }
    Ok(BalloonFacts { wanted_bytes: wanted, ..seen })
}

async fn look(machine: &dyn Machine) -> Result<BalloonFacts, NotReclaimed> {
    machine.balloon().await?.ok_or(NotReclaimed::NoBalloon)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::future::BoxFuture;
    use tokio::net::UnixStream;

    use super::*;
    use crate::status::VmmEnd;
    use crate::vmm::snapshot::{SnapshotFiles, SnapshotKind};

    const MIB: u64 = 1 << 20;

    /// Gives or takes one MiB at each look, and never more than it can give.
    struct Guest {
        balloon: Mutex<BalloonFacts>,
        gives: u64,
    }

    impl Guest {
        fn that_gives(mib: u64) -> Self {
            Self { balloon: Mutex::new(BalloonFacts { wanted_bytes: 0, given_bytes: 0 }), gives: mib * MIB }
        }

        fn facts(&self) -> BalloonFacts {
            *self.balloon.lock().unwrap()
        }
    }

    impl Machine for Guest {
        fn balloon(&self) -> BoxFuture<'_, Result<Option<BalloonFacts>, vmm::Error>> {
            let mut facts = self.balloon.lock().unwrap();
            let to = facts.wanted_bytes.min(self.gives);
            facts.given_bytes = match facts.given_bytes.cmp(&to) {
                std::cmp::Ordering::Less => facts.given_bytes + MIB,
                std::cmp::Ordering::Equal => facts.given_bytes,
                std::cmp::Ordering::Greater => facts.given_bytes - MIB,
            };
            let facts = *facts;
            Box::pin(async move { Ok(Some(facts)) })
        }

        fn inflate(&self, bytes: u64) -> BoxFuture<'_, Result<(), vmm::Error>> {
            self.balloon.lock().unwrap().wanted_bytes = bytes;
            Box::pin(async { Ok(()) })
        }

        fn connect_channel(&self, _: Duration) -> BoxFuture<'_, Result<UnixStream, vmm::Error>> {
            unreachable!("nothing but its balloon is asked for")
        }

        fn pause(&self) -> BoxFuture<'_, Result<(), vmm::Error>> {
            unreachable!("nothing but its balloon is asked for")
        }

        fn resume(&self) -> BoxFuture<'_, Result<(), vmm::Error>> {
            unreachable!("nothing but its balloon is asked for")
        }

        fn snapshot<'a>(
            &'a self,
            _: SnapshotKind,
            _: &'a SnapshotFiles,
        ) -> BoxFuture<'a, Result<(), vmm::Error>> {
            unreachable!("nothing but its balloon is asked for")
        }

        fn ended(&self) -> BoxFuture<'_, VmmEnd> {
            unreachable!("nothing but its balloon is asked for")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_taken_back_and_given_again_to_the_last_page() {
        let guest = Guest::that_gives(100);
        for wanted in [64, 3, 0] {
            let facts = BalloonFacts { wanted_bytes: wanted * MIB, given_bytes: wanted * MIB };
            assert_eq!(reclaim(&guest, wanted * MIB).await.unwrap(), facts);
            assert_eq!(guest.facts(), facts);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_goes_on_wanting_what_a_guest_does_not_give() {
        let guest = Guest::that_gives(40);
        let facts = reclaim(&guest, 64 * MIB).await.unwrap();
        assert_eq!(facts, BalloonFacts { wanted_bytes: 64 * MIB, given_bytes: 40 * MIB });
        assert_eq!(guest.facts().wanted_bytes, 40 * MIB);
    }
}
