//! `imp prune`

use clap::Args;
use imp_embedded::client::Running;
use imp_runtime::status::State;
use imp_storage::store::PruneScope;

use crate::commands::image;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// Remove what has stopped and what nobody uses: VMs with their disks, and images without a name
#[derive(Debug, Args)]
pub(crate) struct Prune {
    /// Every image that no VM uses, with a name or without
    #[arg(short, long)]
    all: bool,
    /// Keep the images
    #[arg(long, conflicts_with = "all")]
    vms_only: bool,
}

impl Prune {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let removed = context.block_on(remove_stopped(context))??;
        output::print(&removed.iter().map(|vm| format!("removed VM {vm}\n")).collect::<String>())?;
        if self.vms_only {
            return Ok(0);
        }
        let scope = if self.all { PruneScope::Unused } else { PruneScope::Unnamed };
        let removed = context.store()?.prune(scope)?;
        image::prune::tell(&removed)?;
        output::say(&format!("{} of images free again", show_bytes(removed.bytes)));
        Ok(0)
    }
}

/// Names of those that went.
async fn remove_stopped(context: &Context) -> anyhow::Result<Vec<String>> {
    let Some(owner) = context.owner_if_any().await? else { return Ok(Vec::new()) };
    let mut removed = Vec::new();
    for vm in owner.list().await? {
        if !matches!(vm.state, State::Stopped | State::Created) {
            continue;
        }
        match owner.remove(vm.id.as_str(), Running::Refuse).await {
            Ok(_) => removed.push(vm.name.to_string()),
            // Somebody else was quicker.
            Err(imp_embedded::client::Error::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(removed)
}
