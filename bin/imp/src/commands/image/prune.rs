//! `imp image prune`

use clap::Args;
use imp_storage::store::{PruneScope, Removed};

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// Remove images that no name leads to, and snapshots of templates that have been made anew
#[derive(Debug, Args)]
pub(crate) struct Prune {
    /// Every image that no VM uses, and every template that no VM and no pool uses
    #[arg(short, long)]
    all: bool,
}

impl Prune {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let scope = if self.all { PruneScope::Unused } else { PruneScope::Unnamed };
        let removed = context.store()?.prune(scope)?;
        tell(&removed)?;
        output::say(&format!("{} free again", show_bytes(removed.bytes)));
        Ok(0)
    }
}

/// What went, one in each line.
pub(crate) fn tell(removed: &Removed) -> std::io::Result<()> {
    let names = removed.names.iter().map(|name| format!("removed name {}\n", name.familiar()));
    let images = removed.images.iter().map(|digest| format!("removed image {digest}\n"));
    let snapshots = removed.snapshots.iter().map(|digest| format!("removed snapshot {digest}\n"));
    output::print(&names.chain(images).chain(snapshots).collect::<String>())
}
