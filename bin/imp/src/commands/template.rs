//! `imp template`: machines that are ready, to make VMs of.

mod build;
mod carry;
mod export;
mod import;
mod inspect;
mod ls;
mod peer;
mod prune;
mod pull;
mod push;
mod rm;
mod serve;
mod verify;

use clap::{Args, Subcommand};

use crate::context::Context;
use crate::exit::Outcome;

/// Build, list, check, carry and remove templates: machines that are ready, of which VMs are made in a moment
#[derive(Debug, Args)]
pub(crate) struct Template {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Build(Box<build::Build>),
    Ls(ls::Ls),
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Export(export::Export),
    Import(import::Import),
    Push(push::Push),
    Pull(Box<pull::Pull>),
    Serve(serve::Serve),
    Prune(prune::Prune),
    Rm(rm::Rm),
}

impl Template {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Build(command) => command.run(context),
            Command::Ls(command) => command.run(context),
            Command::Inspect(command) => command.run(context),
            Command::Verify(command) => command.run(context),
            Command::Export(command) => command.run(context),
            Command::Import(command) => command.run(context),
            Command::Push(command) => command.run(context),
            Command::Pull(command) => command.run(context),
            Command::Serve(command) => command.run(context),
            Command::Prune(command) => command.run(context),
            Command::Rm(command) => command.run(context),
        }
    }
}
