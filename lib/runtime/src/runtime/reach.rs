//! The way to a guest, while it is there and when it comes back.

use std::sync::Arc;

use imp_protocol::connection::Connection;
use tokio::sync::oneshot;

use super::{Error, Runtime};
use crate::guest::{GuestHold, Lane};
use crate::id::VmId;
use crate::logs;
use crate::status::State;
use crate::vm::Message;

impl Runtime {
    /// The connection to the guest agent. While the answer is held, a VM whose main process has ended waits (a few
    /// seconds at the most) before it goes down, so that the last output and the exit status get through.
    pub async fn connection(&self, id: &VmId) -> Result<GuestHold, Error> {
        let handle = self.handle(id)?;
        let connection = handle.connection.borrow().clone();
        let state = handle.status.borrow().state;
        match connection {
            Some(connection) => Ok(GuestHold::new(connection, handle.holders.token())),
            None => Err(Error::NotReachable { id: id.clone(), state }),
        }
    }

    /// As `connection`, and waits for a guest that is not there yet, or whose channel has broken, until its VM has
    /// stopped.
    pub async fn connected(&self, id: &VmId) -> Result<GuestHold, Error> {
        let mut handle = self.handle(id)?;
        let works = |connection: &Connection| !connection.is_closed();
        loop {
            let connection = handle.connection.borrow_and_update().clone();
            if let Some(connection) = connection.filter(works) {
                return Ok(GuestHold::new(connection, handle.holders.token()));
            }
            let state = handle.status.borrow_and_update().state;
            if state == State::Stopped {
                return Err(Error::NotReachable { id: id.clone(), state });
            }
            let changed = tokio::select! {
                changed = handle.connection.changed() => changed,
                changed = handle.status.changed() => changed,
            };
            // Its task has ended, and its VM with it.
            changed.map_err(|_| Error::NotReachable { id: id.clone(), state: State::Stopped })?;
        }
    }

    /// The lane of a VM: see [`Lane`]. None: it has none, or somebody else uses it.
    pub async fn lane(&self, id: &VmId) -> Result<Option<Lane>, Error> {
        let handle = self.handle(id)?;
        let Ok(only) = Arc::clone(&handle.lane).try_acquire_owned() else { return Ok(None) };
        let guest = self.connection(id).await?;
        let (answer, machine) = oneshot::channel();
        handle.messages.send(Message::Machine(answer)).map_err(|_| Error::Ended)?;
        let Ok(machine) = machine.await else { return Ok(None) };
        Ok(Lane::open(machine.as_ref(), guest, only).await.unwrap_or_else(|error| {
            tracing::warn!(vm = %id, %error, "the lane cannot be used");
            None
        }))
    }

    /// Position in the main process's whole output up to which it has been recorded.
    pub async fn recorded(&self, id: &VmId) -> Result<u64, Error> {
        self.handle(id)?;
        let directory = self.shared.context.layout.vm(id).logs();
        let recorded = tokio::task::spawn_blocking(move || logs::recorded(&directory));
        Ok(recorded.await.map_err(|_| Error::Ended)??)
    }
}
