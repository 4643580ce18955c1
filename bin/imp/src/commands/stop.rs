//! `imp stop`

use std::time::Duration;

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;
use crate::value;

/// Ask programs to end, and stop their VMs
///
/// The program gets its stop signal and the time of the VM's --stop-timeout; if it has not ended then, its machine does.
#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
    /// Time between the stop signal and the end, in seconds [default: the VM's own, which is 10 if not set]
    #[arg(short, long, value_name = "SECONDS", allow_hyphen_values = true, value_parser = value::duration)]
    time: Option<Duration>,
}

impl Stop {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |owner, vm| async move {
            owner.stop(vm, self.time).await?;
            Ok(vm.to_owned())
        })
    }
}
