//! `imp template prune`

use clap::Args;
use imp_embedded::report::Template;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// Remove templates that no name leads to, and what interrupted pulls have left
///
/// What a VM or a pool uses stays. Images stay, too: see `imp image prune`.
#[derive(Debug, Args)]
pub(crate) struct Prune {
    /// Templates with a name, too
    #[arg(short, long)]
    all: bool,
}

impl Prune {
    pub(super) fn run(self, context: &Context) -> Outcome {
        context.store()?.snapshots().give_up_arrivals()?;
        let (freed, failed) = context.block_on(async {
            let owner = context.owner().await?;
            let (mut freed, mut failed) = (0, 0);
            for template in owner.templates().await?.iter().filter(|template| self.goes(template)) {
                match owner.remove_template(&template.snapshot.to_string()).await {
                    Ok((digest, bytes)) => {
                        freed += bytes;
                        output::print(&format!("removed template {digest}\n"))?;
                    }
                    // Somebody has begun to use it.
                    Err(error) => {
                        failed += 1;
                        output::complain(&format!("{:#}", anyhow::Error::from(error)));
                    }
                }
            }
            anyhow::Ok((freed, failed))
        })??;
        output::say(&format!("{} free again", show_bytes(freed)));
        Ok(u8::from(failed > 0))
    }

    fn goes(&self, template: &Template) -> bool {
        template.used_by.is_empty() && (self.all || template.names.is_empty())
    }
}
