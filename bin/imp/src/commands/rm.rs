//! `imp rm`

use clap::Args;
use imp_embedded::client::Running;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Remove VMs with their disks and logs, also those that are put away
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name, id, or the beginning of an id; of one that is put away its name, or its whole digest
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
            match owner.remove(vm, running).await {
                // No VM of that name: one that is put away, perhaps.
                Err(unknown) if unknown.is_unknown_vm() => match owner.discard(vm).await {
                    Err(error) if error.is_unknown_vm() => return Err(unknown.into()),
                    discarded => drop(discarded?),
                },
                removed => drop(removed?),
            }
            Ok(vm.to_owned())
        })
    }
}
