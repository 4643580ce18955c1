//! `imp image pull`

use anyhow::Context as _;
use clap::Args;
use imp_storage::image::reference::Reference;
use imp_storage::store::PullPolicy;

use super::source;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::Detail;

/// Take images from a registry, and build their disks
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// Names as for docker: [REGISTRY/]REPOSITORY[:TAG][@DIGEST]
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// No progress: only the digests
    #[arg(short, long)]
    quiet: bool,
}

impl Pull {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let store = context.store()?;
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        for name in &self.images {
            let reference: Reference = name.parse()?;
            let image =
                source::pull(&store, &reference, PullPolicy::Always, detail).with_context(|| name.clone())?;
            output::print(&format!("{}\n", image.digest))?;
        }
        Ok(0)
    }
}
