//! `imp kill`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Send a signal to programs, or end their VMs at once
#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
    /// The signal, by name or number; KILL ends the whole machine
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL")]
    signal: String,
}

impl Kill {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let signal = self.signal.as_str();
        each(context, &self.vms, |owner, vm| async move {
            owner.kill(vm, signal).await?;
            Ok(vm.to_owned())
        })
    }
}
