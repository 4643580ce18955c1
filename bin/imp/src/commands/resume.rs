//! `imp resume`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Have paused VMs go on
///
/// Their clocks are set before their processes run.
#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Resume {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |owner, vm| async move {
            owner.resume(vm).await?;
            Ok(vm.to_owned())
        })
    }
}
