//! `imp pool`: VMs of one template that are kept prepared.

mod create;
mod ls;
mod rm;

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::Outcome;

/// Keep VMs of a template prepared, for `imp run --pool`
#[derive(Debug, Args)]
pub(crate) struct Pool {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Create(create::Create),
    Ls(ls::Ls),
    Rm(rm::Rm),
}

impl Pool {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Create(command) => command.run(context),
            Command::Ls(command) => command.run(context),
            Command::Rm(command) => command.run(context),
        }
    }
}
