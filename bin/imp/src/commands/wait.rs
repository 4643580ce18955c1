//! `imp wait`

use anyhow::Context as _;
use clap::Args;
use imp_runtime::status::State;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Wait until VMs have stopped, and print their exit statuses
#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Wait {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |mut owner, vm| async move {
            let status = loop {
                match owner.wait(vm, State::Stopped).await {
                    // Another one has taken the VM over.
                    Err(error) if error.is_lost() => owner = context.owner().await?,
                    status => break status?,
                }
            };
            let outcome = status.outcome.as_ref();
            let outcome =
                outcome.with_context(|| format!("{} was removed before it had run", status.name))?;
            Ok(outcome.exit_code().to_string())
        })
    }
}
