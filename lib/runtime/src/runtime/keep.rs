//! Snapshots that stay though no VM is made of them now: somebody is going to make some.

use std::collections::BTreeSet;
use std::sync::Arc;

use imp_storage::blob::digest::Digest;

use super::{Error, Runtime};

impl Runtime {
    /// Keeps a snapshot, also under other owners, until [`Runtime::let_go`]. `by`: at most 100 letters, digits, '.', '-' or '_'.
    pub async fn keep(&self, snapshot: &Digest, by: &str) -> Result<(), Error> {
        let (context, snapshot, by) = (Arc::clone(self.context()), *snapshot, by.to_owned());
        let kept =
            tokio::task::spawn_blocking(move || context.keeper.pin_for(&context.store, &snapshot, &by));
        Ok(kept.await.map_err(|_| Error::Ended)??)
    }

    /// Takes back all that is kept by this name.
    pub async fn let_go(&self, by: &str) -> Result<(), Error> {
        let (context, by) = (Arc::clone(self.context()), by.to_owned());
        let gone = tokio::task::spawn_blocking(move || context.keeper.unpin_for(&context.store, &by));
        Ok(gone.await.map_err(|_| Error::Ended)??)
    }

    /// All names by which something is kept.
    pub async fn keepers(&self) -> Result<BTreeSet<String>, Error> {
        let context = Arc::clone(self.context());
        let names = tokio::task::spawn_blocking(move || context.keeper.keep_something(&context.store));
        Ok(names.await.map_err(|_| Error::Ended)??)
    }
}
