//! `imp resume`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Have VMs go on that are paused or put away
///
/// Their clocks are set before their processes run.
#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// Name, id, or the beginning of an id; of one that is put away its name, or the beginning of its digest
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Resume {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |owner, vm| async move {
            match owner.resume(vm).await {
                // No VM of that name: one that is put away, perhaps.
                Err(unknown) if unknown.is_unknown_vm() => match owner.wake(vm).await {
                    Err(error) if error.is_unknown_vm() => return Err(unknown.into()),
                    woken => drop(woken?),
                },
                resumed => drop(resumed?),
            }
            Ok(vm.to_owned())
        })
    }
}
