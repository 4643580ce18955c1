//! `imp rm`

use clap::Args;
use imp_embedded::client::Running;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Remove VMs with their disks and logs
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
    /// End those that still run
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let running = if self.force { Running::EndFirst } else { Running::Refuse };
        each(context, &self.vms, |owner, vm| async move {
            owner.remove(vm, running).await?;
            Ok(vm.to_owned())
        })
    }
}
