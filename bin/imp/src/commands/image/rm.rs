//! `imp image rm`

use clap::Args;
use imp_storage::store::Removal;

use super::prune::tell;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Remove images
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name, digest, or the beginning of a digest
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// With all its names, also when a VM uses it (the VM keeps its disk)
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let store = context.store()?;
        let removal = if self.force { Removal::Forced } else { Removal::Careful };
        let mut code = 0;
        for name in &self.images {
            match store.remove(name, removal) {
                Ok(removed) => tell(&removed)?,
                Err(error) => {
                    output::complain(&format!("{:#}", anyhow::Error::from(error)));
                    code = 1;
                }
            }
        }
        Ok(code)
    }
}
