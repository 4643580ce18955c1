//! `imp owner`: the background process that owns the VMs. Not for people, but for `stop`.

pub(crate) mod serve;

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use imp_embedded::start;

use crate::context::Context;
use crate::exit::Outcome;

/// How long an owner may take to let go of its VMs: one that does not answer is what this command is called for, too.
const PATIENCE: Duration = Duration::from_secs(30);

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
            let handed_over = tokio::time::timeout(PATIENCE, owner.hand_over()).await;
            handed_over
                .map_err(anyhow::Error::from)
                .and_then(|handed_over| Ok(handed_over?))
                .context("the owner did not hand over; it can be killed, its VMs go on")?;
            Ok(0)
        })?
    }
}
