//! Templates on their way from and to other machines: which one is meant, and what becomes of one that arrives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use imp_embedded::name::TemplateName;
use imp_runtime::Digest;
use imp_storage::progress::{Event, Progress};
use imp_storage::snapshots::{Arrival, Error, Manifest, Snapshots, Unwanted};
use imp_storage::store::PullPolicy;

use crate::context::Context;
use crate::output;
use crate::progress::{Detail, Display};
use crate::value::show_bytes;

/// The snapshot of a template, by a name or the beginning of a digest.
pub(super) fn find(context: &Context, text: &str) -> anyhow::Result<Digest> {
    let found = context.block_on(async { anyhow::Ok(context.owner().await?.template(text).await?) })??;
    Ok(found.snapshot)
}

/// How a template is brought here.
pub(super) struct Bringing {
    /// Leads to it from then on.
    pub(super) name: TemplateName,
    /// Of the image below it, when that is not here.
    pub(super) image: PullPolicy,
    pub(super) detail: Detail,
}

impl Bringing {
    /// Takes a template by `take`, if VMs can be made of it here. All that can be known without its chunks is found out before
    /// the first of them comes, and its base disk is made.
    pub(super) fn bring(
        &self,
        context: &Context,
        take: impl FnOnce(&Snapshots<'_>, &dyn Progress) -> Result<Arrival, Error>,
    ) -> anyhow::Result<Digest> {
        let store = context.store()?;
        let display = Display::new(self.detail);
        let base = Mutex::new(None);
        let judge = |snapshot: &Digest, manifest: &Manifest| -> Result<(), Unwanted> {
            let bytes = manifest.bytes()?;
            let asked = async { anyhow::Ok(context.owner().await?.would_restore(snapshot, bytes).await?) };
            context.block_on(asked)??;
            let disk = store.snapshots().base_disk(manifest, self.image, &display)?;
            // Held until the snapshot itself holds it.
            *base.lock().unwrap_or_else(PoisonError::into_inner) = Some(disk);
            Ok(())
        };
        let has_begun = AtomicBool::new(false);
        let watched = |event: Event| {
            has_begun.fetch_or(matches!(event, Event::Transferred { .. }), Ordering::Relaxed);
            display.report(event);
        };
        let arrival = take(&store.snapshots().judged_by(&judge), &watched).map_err(|error| {
            let goes_on = has_begun.load(Ordering::Relaxed) && leaves_a_part(&error);
            let error = anyhow::Error::from(error);
            if goes_on {
                error.context("the template did not arrive; the same command goes on with what has")
            } else {
                error
            }
        })?;
        let digest = arrival.snapshot.digest;
        context.block_on(async {
            anyhow::Ok(context.owner().await?.keep_template(&self.name, &digest).await?)
        })??;
        if self.detail == Detail::Shown {
            output::say(&told(&arrival));
        }
        Ok(digest)
    }
}

/// Whether what has arrived is good for another attempt.
fn leaves_a_part(error: &Error) -> bool {
    matches!(
        error,
        Error::Registry { .. }
            | Error::Peer { .. }
            | Error::Archive { .. }
            | Error::NotThere { .. }
            | Error::WrongChunk { .. }
            | Error::WrongBlob { .. }
            | Error::DiskFull { .. }
    )
}

fn told(arrival: &Arrival) -> String {
    let Arrival { fetched, shared, resumed, .. } = arrival;
    if fetched + shared + resumed == 0 {
        return "it is there already".to_owned();
    }
    let parts = [(*fetched, "fetched"), (*shared, "shared with other templates"), (*resumed, "there before")];
    let parts = parts.iter().filter(|(bytes, _)| *bytes > 0);
    parts.map(|(bytes, what)| format!("{} {what}", show_bytes(*bytes))).collect::<Vec<_>>().join(", ")
}
