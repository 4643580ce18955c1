//! `imp attach`

use clap::Args;
use imp_embedded::client::{AttachedStdin, Attachment};

use crate::commands::run::explain;
use crate::context::Context;
use crate::exit::{OWN_FAILURE, Outcome};
use crate::output;
use crate::session::{self, End, Interrupts, Program, Signals, Stdin, Wiring, Written, exit_status};
use crate::terminal::DetachKeys;

/// Connect this terminal to a VM's program
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// Name, id, or the beginning of an id
    vm: String,
    /// Send no input
    #[arg(long)]
    no_stdin: bool,
    /// Pass signals on to the program; `--sig-proxy=false` keeps them
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
          default_missing_value = "true", require_equals = true)]
    sig_proxy: bool,
    /// Keys that leave the program running
    #[arg(long, value_name = "KEYS", allow_hyphen_values = true, default_value = "ctrl-p,ctrl-q")]
    detach_keys: DetachKeys,
}

impl Attach {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        context.block_on(async {
            let owner = context.owner().await?;
            let stdin = if self.no_stdin { AttachedStdin::None } else { AttachedStdin::Shared };
            let attached = owner.attach(&self.vm, Attachment { stdin, from_offset: None }).await?;
            let wiring = Wiring {
                stdin: if self.no_stdin { Stdin::None } else { Stdin::SentWithoutEnd },
                // A size that a program without a terminal is sent means nothing to it.
                terminal: session::Terminal::Own,
                signals: if self.sig_proxy { Signals::PassedOn } else { Signals::Kept },
                reader: session::Reader::OneOfMany,
                detach_keys: self.detach_keys.clone(),
            };
            match session::run(
                &mut Program::Main(Box::new(attached)),
                &wiring,
                &mut Interrupts::catch()?,
                &mut Written { bytes: 1, first: None },
            )
            .await?
            {
                End::Exited(exit) => Ok(exit.code()),
                End::Failed(status) => {
                    explain(&status);
                    Ok(OWN_FAILURE)
                }
                End::Detached => {
                    output::say("\ndetached");
                    Ok(0)
                }
                End::Interrupted(kind) | End::LeftRunning(kind) => Ok(exit_status(kind)),
                End::BrokenPipe => Err(crate::exit::nobody_reads().into()),
            }
        })?
    }
}
