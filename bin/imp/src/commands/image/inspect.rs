//! `imp image inspect`

use clap::Args;
use imp_storage::image::config::ImageConfig;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Show what images say of themselves, as JSON
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Name, digest, or the beginning of a digest
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
}

#[derive(Serialize)]
struct Shown {
    digest: String,
    config: ImageConfig,
}

impl Inspect {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let store = context.store()?;
        let show = |name: &String| {
            let image = store.resolve(name)?;
            anyhow::Ok(Shown { digest: image.digest.to_string(), config: store.inspect(&image)? })
        };
        let shown: Vec<Shown> = self.images.iter().map(show).collect::<Result<_, _>>()?;
        output::print(&output::json(&shown))?;
        Ok(0)
    }
}
