//! `imp prune`

use std::time::{Duration, SystemTime};

use clap::Args;
use imp_embedded::client::Running;
use imp_runtime::status::{State, VmStatus};
use imp_storage::store::PruneScope;

use crate::commands::image;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// How long a command may take from the creation of a VM to its start.
const START: Duration = Duration::from_secs(60);

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
    let now = SystemTime::now();
    for vm in owner.list().await? {
        if !goes(&vm, now) {
            continue;
        }
        if let Err(error) = owner.remove(vm.id.as_str(), Running::Refuse).await {
            // Somebody else was quicker, if it is gone or runs by now.
            let is_there = owner.inspect(vm.id.as_str()).await.is_ok_and(|vm| goes(&vm, now));
            if error.is_lost() || is_there {
                return Err(error.into());
            }
            continue;
        }
        removed.push(vm.name.to_string());
    }
    Ok(removed)
}

fn goes(vm: &VmStatus, now: SystemTime) -> bool {
    match vm.state {
        State::Stopped => true,
        // Between its creation and its start, unless whoever made it is gone.
        State::Created => abandoned(vm.created, now),
        State::Starting
        | State::Prepared
        | State::Running
        | State::Asleep
        | State::Paused
        | State::Stopping => false,
    }
}

fn abandoned(created: SystemTime, now: SystemTime) -> bool {
    now.duration_since(created).is_ok_and(|age| age > START)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_was_just_made_is_not_taken_for_one_that_nobody_starts() {
        let now = SystemTime::now();
        let judge = |age: u64| abandoned(now - Duration::from_secs(age), now);
        assert!(!judge(0) && !judge(30) && judge(120));
        // A clock that was set back says nothing about age.
        assert!(!abandoned(now + Duration::from_secs(3600), now));
    }
}
