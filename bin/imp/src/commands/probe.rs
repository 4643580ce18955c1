//! `imp probe`: finds out by measuring what the design of this system rests on.

mod cow;
mod verdict;

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::Outcome;

/// Measure what VMs of one template share on this machine
#[derive(Debug, Args)]
pub(crate) struct Probe {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Cow(cow::Cow),
}

impl Probe {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Cow(command) => command.run(context),
        }
    }
}
