//! `imp owner`: the background process that owns the VMs. Not for people, but for `stop`.

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use imp_embedded::client::Identity;
use imp_embedded::serve::{self, Settings};
use imp_embedded::start::{self, FAILED, OWNED, READY};

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// The background process that owns the VMs
#[derive(Debug, Args)]
pub(crate) struct Owner {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Serve),
    Stop(Stop),
}

/// Become the owner: started by other commands
#[derive(Debug, Args)]
struct Serve {
    /// How long to stay without VMs and clients, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    idle_seconds: u64,
}

/// End the owner; VMs go on, and the next command starts a new one
#[derive(Debug, Args)]
struct Stop {}

impl Owner {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self.command {
            Command::Serve(serve) => serve.run(context),
            Command::Stop(stop) => stop.run(context),
        }
    }
}

impl Serve {
    fn run(self, context: &Context) -> Outcome {
        let result = self.serve(context);
        match &result {
            Ok(()) => return Ok(0),
            Err(error) if matches!(error.downcast_ref(), Some(serve::Error::Owned(_))) => {
                output::print(&format!("{OWNED}\n"))?;
            }
            Err(error) => output::print(&format!("{FAILED}{}\n", format!("{error:#}").replace('\n', " ")))?,
        }
        Ok(1)
    }

    fn serve(self, context: &Context) -> anyhow::Result<()> {
        // Away from the terminal of whoever started this; an error says that it is away already.
        let _ = rustix::process::setsid();
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let layout = context.settings.layout.clone();
        let filter = std::env::var("IMP_LOG").unwrap_or_else(|_| "info".to_owned());
        serve::log_to_file(&layout, &filter)?;
        let settings = Settings {
            layout,
            guest_agent: context.settings.guest_agent.clone(),
            qemu: context.settings.qemu.clone(),
            idle_after: Duration::from_secs(self.idle_seconds),
            identity: Identity {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                build: context.build()?,
                pid: std::process::id(),
            },
        };
        let ready = || {
            // Nobody to tell when whoever started this is gone.
            let _ = output::print(&format!("{READY}\n"));
        };
        context.block_on(serve::serve(settings, ready))?.map_err(anyhow::Error::from)
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
