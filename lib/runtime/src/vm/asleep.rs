//! Puts a VM to sleep, has it written down, and has it go on, as itself or as a new machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use imp_protocol::causes::chain;
use imp_protocol::connection::{self, Connection};
use tokio::time::{sleep, timeout};

use super::asks::Saved;
use super::{Message, Vm, spawn};
use crate::changes;
use crate::guest::restore::{self, Wake};
use crate::guest::{self, Channel};
use crate::lifecycle::{After, Input};
use crate::random;
use crate::status::{AgentFacts, Failure, WakeTimes};
use crate::vmm::{self, Machine};

/// After this a guest whose host is gone lets its processes run again. What passes while it is paused does not count. Longer
/// than any child of it may take to be woken: one that runs before that is lost.
const AT_MOST: Duration = Duration::from_secs(300);
/// What a guest that has just gone on gets to take a connection, and then to greet; doubled each time. The first connection
/// may stay silent for good.
const FIRST_ANSWER: Duration = Duration::from_millis(250);
const LONGEST_ANSWER: Duration = Duration::from_secs(4);
/// Between two refusals, which come at once and mean that the guest is not there yet.
const PAUSE: Duration = Duration::from_millis(1);

/// A call that failed because its connection broke is told a moment before the connection says so.
const BREAK_IS_SEEN: Duration = Duration::from_millis(100);

impl Vm {
    pub(super) fn sleep(&mut self) {
        let Some(connection) = self.connection.borrow().clone() else {
            let _ = self.messages.send(Message::Happened(Input::ChannelLost));
            return;
        };
        // A machine that is only written down has nobody who might not come back.
        let at_most = match self.asks.save().map(|save| save.after) {
            Some(After::End | After::Keep) => None,
            Some(After::GoOn) | None => Some(AT_MOST),
        };
        let guest = self.guest();
        self.step = Some(spawn(async move {
            match restore::sleep(&connection, at_most).await {
                Ok(_) => guest.tell(Input::Slept),
                Err(error) if error.is_unimplemented() => guest.tell(Input::NotSlept),
                Err(error) => {
                    let failure = Failure::Setup { detail: chain(&error) };
                    guest.broken(&connection, Input::Failed(failure)).await;
                }
            }
        }));
    }

    /// Writes memory, or what has changed in it, state and disk of the machine, which stands still meanwhile and afterwards.
    pub(super) fn save(&mut self) {
        self.hang_up();
        let Some((machine, save)) = self.machine.clone().zip(self.asks.save()) else { return };
        let (kind, files) = changes::written(&self.record, &save.files);
        let (to, from) = (save.scratch.clone(), self.layout.scratch());
        let (record, messages) = (Box::new(self.record.clone()), self.messages.clone());
        self.step = Some(spawn(async move {
            let began = Instant::now();
            let written = async {
                machine.pause().await.map_err(|error| chain(&error))?;
                machine.snapshot(kind, &files).await.map_err(|error| chain(&error))?;
                let cloned =
                    tokio::task::spawn_blocking(move || imp_storage::disk::clone_scratch(&from, &to)).await;
                cloned.map_err(|error| error.to_string())?.map_err(|error| chain(&error))
            };
            let message = match written.await {
                Ok(_) => Message::Saved(Saved { record, paused: began.elapsed() }),
                Err(detail) => Message::Happened(Input::Failed(Failure::Setup { detail })),
            };
            let _ = messages.send(message);
        }));
    }

    pub(super) fn pause(&mut self) {
        self.hang_up();
        let Some(machine) = self.machine.clone() else { return self.take_over_machine() };
        let messages = self.messages.clone();
        self.step = Some(spawn(async move {
            let input = match machine.pause().await {
                Ok(()) => Input::Halted,
                Err(error) => Input::Failed(Failure::Setup { detail: chain(&error) }),
            };
            let _ = messages.send(Message::Happened(input));
        }));
    }

    /// Has the machine go on as the one it was.
    pub(super) fn rouse(&mut self) {
        self.go_on(Wake::Same);
    }

    /// Has the machine go on as the one that it is to be.
    pub(super) fn wake(&mut self) {
        if let Some(wake) = self.wake_as() {
            self.go_on(wake);
        }
    }

    fn go_on(&mut self, wake: Wake) {
        self.hang_up();
        let Some(machine) = self.machine.clone() else { return self.take_over_machine() };
        let messages = self.messages.clone();
        let known = self.record.status.agent.clone();
        // A machine that goes on as it was has been waited for long enough.
        let turns = match &wake {
            Wake::New(_) => Some(Arc::clone(&self.context.coming_to_life)),
            Wake::Same => None,
        };
        self.step = Some(spawn(async move {
            let _turn = match &turns {
                Some(turns) => turns.acquire().await.ok(),
                None => None,
            };
            let message = match woken(machine.as_ref(), &wake, known).await {
                Ok((connection, agent, channel, times)) => Message::Woken(connection, agent, channel, times),
                Err(detail) => Message::Happened(Input::Failed(Failure::Setup { detail })),
            };
            let _ = messages.send(message);
        }));
    }

    /// What another owner started, unless that is under way.
    pub(super) fn take_over_machine(&mut self) {
        if let Some(process) = self.vmm.clone()
            && self.step.is_none()
        {
            let (driver, layout) = (Arc::clone(&self.driver), self.layout.clone());
            self.attach(async move { driver.adopt(&layout, process).await });
        }
    }

    /// A guest that stands still answers nobody, and must not find half a message when it goes on.
    fn hang_up(&mut self) {
        self.connection.send_replace(None);
        self.loss_watch = None;
        self.channel = None;
    }
}

/// Resumes the machine, reaches its guest, and has it confirm what must be. A connection that breaks is made again: nothing
/// else is to be expected of the first ones. The caller sets the deadline.
async fn woken(
    machine: &dyn Machine,
    wake: &Wake,
    known: Option<AgentFacts>,
) -> Result<(Connection, AgentFacts, Channel, WakeTimes), String> {
    let began = Instant::now();
    machine.resume().await.map_err(|error| chain(&error))?;
    let resume = began.elapsed();
    loop {
        let (connection, software, channel) = reach(machine).await.map_err(|error| chain(&error))?;
        let reach = began.elapsed() - resume;
        match restore::wake(&connection, wake).await {
            Ok(woken) => {
                tracing::debug!(?woken, "awake");
                let confirm = began.elapsed() - resume - reach;
                let repairs = woken.done.iter().map(|(repair, took)| (repair.name(), *took)).collect();
                let times = WakeTimes { resume, reach, confirm, repairs };
                // The kernel is that of the snapshot.
                let kernel_release = known.map(|agent| agent.kernel_release).unwrap_or_default();
                let agent = AgentFacts { version: software, kernel_release };
                return Ok((connection, agent, channel, times));
            }
            Err(error) if timeout(BREAK_IS_SEEN, connection.closed()).await.is_err() => {
                return Err(chain(&error));
            }
            Err(error) => tracing::debug!(error = chain(&error), "a connection broke while its guest woke"),
        }
    }
}

/// A connection to a guest that has been reached before, as soon as there can be one.
async fn reach(machine: &dyn Machine) -> Result<(Connection, String, Channel), guest::Error> {
    let mut patience = FIRST_ANSWER;
    loop {
        let opened = machine.connect_channel(patience).await;
        if opened.as_ref().is_err_and(vmm::Error::is_silence) {
            patience = (patience * 2).min(LONGEST_ANSWER);
        }
        if let Ok((held, stream)) = opened.and_then(Channel::hold) {
            match timeout(patience, connection::connect(stream, random::number())).await {
                Ok(Ok((connection, peer))) => return Ok((connection, peer.software, held)),
                Ok(Err(connection::Error::Greeting(error @ imp_protocol::hello::Error::TooOld { .. }))) => {
                    return Err(guest::Error::Version(error));
                }
                Ok(Err(error)) => tracing::trace!(%error, "no answer on the channel yet"),
                Err(_) => patience = (patience * 2).min(LONGEST_ANSWER),
            }
        }
        sleep(PAUSE).await;
    }
}
