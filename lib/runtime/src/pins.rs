//! Keeps the base disk of a living VM in the store, and the snapshot that it was made of.

use imp_storage::blob::digest::Digest;
use imp_storage::store::{self, Store};

use crate::id::VmId;

const PREFIX: &str = "vm-";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{key:?} is not the key of a disk")]
    Key { key: String },
    #[error("{key} cannot be kept for the VM")]
    Pin {
        key: String,
        #[source]
        source: Box<store::Error>,
    },
    #[error("what is kept by {by} cannot be let go")]
    LetGo {
        by: String,
        #[source]
        source: Box<store::Error>,
    },
    #[error("the disk of VM {id} cannot be let go")]
    Unpin {
        id: VmId,
        #[source]
        source: Box<store::Error>,
    },
}

pub(crate) fn pin(store: &Store, key: &str, id: &VmId) -> Result<(), Error> {
    let digest: Digest = key.parse().map_err(|_| Error::Key { key: key.to_owned() })?;
    store
        .pin(&digest, &owner(id))
        .map_err(|source| Error::Pin { key: key.to_owned(), source: Box::new(source) })
}

/// The snapshot whose memory the VM maps.
pub(crate) fn pin_snapshot(store: &Store, snapshot: &Digest, id: &VmId) -> Result<(), Error> {
    store
        .pin(snapshot, &owner(id))
        .map_err(|source| Error::Pin { key: snapshot.to_string(), source: Box::new(source) })
}

/// A snapshot for somebody who is no VM.
pub(crate) fn pin_for(store: &Store, snapshot: &Digest, by: &str) -> Result<(), Error> {
    store
        .pin(snapshot, by)
        .map_err(|source| Error::Pin { key: snapshot.to_string(), source: Box::new(source) })
}

pub(crate) fn unpin_for(store: &Store, by: &str) -> Result<(), Error> {
    store.unpin_all(by).map_err(|source| Error::LetGo { by: by.to_owned(), source: Box::new(source) })
}

pub(crate) fn unpin(store: &Store, id: &VmId) -> Result<(), Error> {
    store.unpin_all(&owner(id)).map_err(|source| Error::Unpin { id: id.clone(), source: Box::new(source) })
}

/// Takes back the pins of VMs that are not among the living.
pub(crate) fn unpin_all_but(store: &Store, living: &[&VmId]) -> Result<(), store::Error> {
    for pin in store.pins()? {
        if vm_of(&pin.owner).is_some_and(|id| !living.contains(&&id)) {
            store.unpin_all(&pin.owner)?;
        }
    }
    Ok(())
}

/// The VM that owns a pin; none if something else does.
#[must_use]
pub fn vm_of(owner: &str) -> Option<VmId> {
    owner.strip_prefix(PREFIX)?.parse().ok()
}

fn owner(id: &VmId) -> String {
    format!("{PREFIX}{id}")
}
