//! `imp owner`: the background process that owns the VMs. Not for people, but for `stop`.

pub(crate) mod serve;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use imp_embedded::start;

use crate::context::Context;
use crate::exit::Outcome;

/// The background process that owns the VMs
#[derive(Debug, Args)]
pub(crate) struct Owner {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Stop(Stop),
}

/// End the owner; VMs go on, and the next command starts a new one
#[derive(Debug, Args)]
struct Stop {}

impl Owner {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Stop(stop) => stop.run(context),
        }
    }
}

impl Stop {
    fn run(self, context: &Context) -> Outcome {
        context.block_on(async {
            let Some(owner) = start::find(&context.settings.layout).await? else { return Ok(0) };
            owner
                .hand_over()
                .await
                .context("the owner did not hand over; it can be killed, its VMs go on")?;
            Ok(0)
        })?
    }
}
