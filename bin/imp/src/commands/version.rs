//! `imp version`

use clap::Args;
use imp_embedded::start;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{self, Format};

/// Show the version of this program, and of the owner of the VMs if there is one
#[derive(Debug, Args)]
pub(crate) struct Version {
    /// Form of the output
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORM")]
    output: Format,
}

#[derive(Serialize)]
struct Shown {
    version: &'static str,
    owner: Option<Owner>,
}

#[derive(Serialize)]
struct Owner {
    version: String,
    pid: u32,
    /// Whether it is this very program; if not, the next command replaces it.
    same_build: bool,
}

impl Version {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let build = context.build()?;
        let owner = context.block_on(async {
            let Some(owner) = start::find(&context.settings.layout).await? else { return anyhow::Ok(None) };
            let identity = match owner.identify().await {
                // It ended while it was asked.
                Err(imp_embedded::client::Error::Lost(_)) => return Ok(None),
                identity => identity?,
            };
            Ok(Some(Owner {
                same_build: identity.build == build,
                version: identity.version,
                pid: identity.pid,
            }))
        })??;
        let shown = Shown { version: env!("CARGO_PKG_VERSION"), owner };
        output::print(&match self.output {
            Format::Json => output::json(&shown),
            Format::Name => format!("{}\n", shown.version),
            Format::Table => {
                let owner = match &shown.owner {
                    Some(owner) => format!("{} (process {})", owner.version, owner.pid),
                    None => "not running".to_owned(),
                };
                format!("imp    {}\nowner  {owner}\n", shown.version)
            }
        })?;
        Ok(0)
    }
}
