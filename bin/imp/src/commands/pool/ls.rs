//! `imp pool ls`

use clap::Args;
use imp_embedded::report::Pool;
use imp_runtime::Digest;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{Listing, Row};

/// List pools
#[derive(Debug, Args)]
#[command(visible_alias = "list")]
pub(crate) struct Ls {
    #[command(flatten)]
    listing: Listing,
}

/// A pool as it is listed.
#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    /// As it was asked for.
    template: String,
    /// Of the snapshot.
    digest: Digest,
    size: u32,
    /// VMs that wait.
    ready: u32,
    /// Why the last VM could not be prepared, or ended while it waited.
    failed: Option<String>,
}

impl From<Pool> for Shown {
    fn from(pool: Pool) -> Self {
        let Pool { name, template, snapshot, size, ready, failed } = pool;
        Self { name, template, digest: snapshot, size, ready, failed }
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] = &["POOL", "TEMPLATE", "DIGEST", "READY", "PROBLEM"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.template.clone(),
            self.digest.short(),
            format!("{} of {}", self.ready, self.size),
            self.failed.clone().unwrap_or_default(),
        ]
    }

    fn id(&self) -> String {
        self.name.clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl Ls {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let pools = context.block_on(async { anyhow::Ok(context.owner().await?.list_pools().await?) })??;
        self.listing.print(&pools.into_iter().map(Shown::from).collect::<Vec<_>>())?;
        Ok(0)
    }
}
