//! Templates that come from other machines: whether VMs of them could run here, and that they stay.

use std::sync::Arc;

use imp_storage::blob::digest::Digest;
use imp_storage::snapshots::manifest::Kind;
use imp_storage::snapshots::mismatch::check;
use imp_storage::snapshots::{self, Manifest, Mismatch};

use super::{Error, Runtime};
use crate::restore;
use crate::spec::KernelChoice;
use crate::{boot, vm};

impl Runtime {
    /// Whether VMs could be made here of a template that is on its way, by the bytes of its manifest. Its base disk is another
    /// question.
    pub async fn would_restore(&self, snapshot: &Digest, manifest: &[u8]) -> Result<(), Error> {
        let manifest = Manifest::parse(manifest).map_err(snapshots::Error::Description).map_err(Box::new)?;
        self.fits(*snapshot, manifest).await
    }

    async fn fits(&self, snapshot: Digest, manifest: Manifest) -> Result<(), Error> {
        let context = Arc::clone(self.context());
        let looked = tokio::task::spawn_blocking(move || look(&context, snapshot, &manifest));
        looked.await.map_err(|_| Error::Ended)?
    }

    /// Has a template that was brought here stay, if VMs can be made of it.
    pub async fn template_keep(&self, snapshot: &Digest) -> Result<(), Error> {
        let opened = self.opened(snapshot).await?;
        self.fits(opened.digest, opened.manifest.clone()).await?;
        let context = Arc::clone(self.context());
        let kept = tokio::task::spawn_blocking(move || context.store.snapshots().keep(&opened.digest));
        Ok(kept.await.map_err(|_| Error::Ended)?.map_err(Box::new)?)
    }
}

fn look(context: &vm::Context, snapshot: Digest, manifest: &Manifest) -> Result<(), Error> {
    let description = &manifest.description;
    match description.kind {
        Kind::Template => {}
        Kind::Fork | Kind::Suspend => return Err(Error::NotATemplate { snapshot }),
    }
    let refused = |reason| Error::Snapshots(Box::new(snapshots::Error::Refused { snapshot, reason }));
    let vmm = description.vmm.name.clone();
    let driver = context.drivers.named(&vmm).ok_or(Error::NoVmm { vmm })?;
    check(description, &restore::host(driver.facts())).map_err(refused)?;
    let configuration = restore::configuration(snapshot, description)?;
    match restore::kernel(&configuration, description) {
        // A path of the machine that made it.
        KernelChoice::File(_) => Err(refused(Mismatch::OwnKernel)),
        kernel @ (KernelChoice::Default | KernelChoice::Bundle(_)) => {
            match boot::kernel(&context.layout, &kernel) {
                Ok(_) => Ok(()),
                Err(boot::Error::NoBundle { .. }) => {
                    Err(refused(Mismatch::NoKernel { made: description.kernel }))
                }
                Err(error) => Err(error.into()),
            }
        }
    }
}
