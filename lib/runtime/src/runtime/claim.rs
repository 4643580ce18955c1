//! Prepared VMs that somebody takes and wants to have under a name of their own, or with ports.

use std::sync::Arc;

use imp_protocol::connection::Connection;
use tokio::sync::watch;

use super::{Error, Runtime};
use crate::id::VmId;
use crate::ports::{self, Published};
use crate::spec::{Claim, Identity, NetworkMode, PublishedPort, VmName};
use crate::status::VmStatus;
use crate::vm::Given;

/// A name that a VM is about to get and that nobody else gets meanwhile.
struct Naming<'a> {
    runtime: &'a Runtime,
    id: VmId,
}

impl Drop for Naming<'_> {
    fn drop(&mut self) {
        self.runtime.vms().naming.remove(&self.id);
    }
}

impl Runtime {
    /// As [`Runtime::activate`], for somebody who wants more than the VM as it was prepared. A name or a port that is taken
    /// leaves it as it was.
    pub async fn claim(&self, id: &VmId, claim: Claim, identity: Identity) -> Result<Arc<VmStatus>, Error> {
        let _naming = claim.name.as_ref().map(|name| self.name(id, name)).transpose()?;
        let Claim { name, labels, ports, when_stopped } = claim;
        let ports = self.published(id, &ports).await?;
        self.activate_with(id, identity, Given { name, labels, ports, when_stopped }).await
    }

    fn name(&self, id: &VmId, name: &VmName) -> Result<Naming<'_>, Error> {
        let mut vms = self.vms();
        if vms.is_taken(name) {
            return Err(Error::NameTaken { name: name.clone() });
        }
        vms.naming.insert(id.clone(), name.clone());
        Ok(Naming { runtime: self, id: id.clone() })
    }

    async fn published(&self, id: &VmId, wanted: &[PublishedPort]) -> Result<Vec<Published>, Error> {
        let handle = self.handle(id)?;
        let mode = handle.status.borrow().network.mode;
        let mut published = Vec::new();
        for port in wanted {
            published.push(publish(mode, *port, handle.connection.clone()).await?);
        }
        Ok(published)
    }
}

async fn publish(
    mode: NetworkMode,
    port: PublishedPort,
    guest: watch::Receiver<Option<Connection>>,
) -> Result<Published, ports::Error> {
    match mode {
        NetworkMode::Bridge => ports::reserve(port),
        NetworkMode::User | NetworkMode::None => ports::publish(port, guest).await,
    }
}
