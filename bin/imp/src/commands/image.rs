//! `imp image`: the images of this machine.

mod import;
mod inspect;
mod ls;
pub(crate) mod prune;
mod pull;
mod rm;
pub(crate) mod source;

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::Outcome;

/// Pull, import, list and remove images
#[derive(Debug, Args)]
pub(crate) struct Image {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Pull(pull::Pull),
    Import(import::Import),
    Ls(ls::Ls),
    Inspect(inspect::Inspect),
    Rm(rm::Rm),
    Prune(prune::Prune),
}

impl Image {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Pull(command) => command.run(context),
            Command::Import(command) => command.run(context),
            Command::Ls(command) => command.run(context),
            Command::Inspect(command) => command.run(context),
            Command::Rm(command) => command.run(context),
            Command::Prune(command) => command.run(context),
        }
    }
}
