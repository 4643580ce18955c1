//! `imp pause`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Stop VMs until `imp resume`: their processes and their machines stand still, their memory stays
///
/// What runs in them by `imp exec` loses its connection; the programs go on with `imp resume`.
#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Pause {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |owner, vm| async move {
            owner.pause(vm).await?;
            Ok(vm.to_owned())
        })
    }
}
