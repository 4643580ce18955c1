//! `imp pool rm`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Remove pools with the VMs that wait in them; those that were taken go on
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name of a pool
    #[arg(required = true, value_name = "POOL")]
    pools: Vec<String>,
}

impl Rm {
    pub(super) fn run(self, context: &Context) -> Outcome {
        each(context, &self.pools, |owner, pool| async move {
            owner.remove_pool(pool).await?;
            Ok(pool.to_owned())
        })
    }
}
