//! `imp pool create`

use clap::Args;
use imp_embedded::name::PoolName;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Begin to keep VMs of a template prepared
///
/// They are made in the background, one after the other, and again after each `imp run --pool`. The pool stays with the
/// template that is meant now, also when the name leads to another one later.
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Name of the pool: 1 to 40 letters, digits, '_', '.' or '-'
    name: PoolName,
    /// Name of a template, or the beginning of a digest
    #[arg(long, value_name = "TEMPLATE")]
    template: String,
    /// How many VMs are to wait
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, default_value = "3")]
    size: u32,
}

impl Create {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let made = async {
            anyhow::Ok(context.owner().await?.create_pool(&self.name, &self.template, self.size).await?)
        };
        let pool = context.block_on(made)??;
        output::print(&format!("{}\n", pool.name))?;
        Ok(0)
    }
}
