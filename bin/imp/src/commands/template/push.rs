//! `imp template push`

use clap::Args;
use imp_storage::image::reference::Reference;

use super::carry;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::{Detail, Display};

/// Send a template to a registry, as an OCI artifact
///
/// What the registry has already is not sent again, so a push that was interrupted goes on where it was. Prints the digest
/// of the artifact.
#[derive(Debug, Args)]
pub(crate) struct Push {
    /// Name, or the beginning of a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Where to: [REGISTRY/]REPOSITORY[:TAG]
    #[arg(value_name = "REFERENCE")]
    reference: Reference,
    /// No progress: only the digest
    #[arg(short, long)]
    quiet: bool,
}

impl Push {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let digest = carry::find(context, &self.template)?;
        let display = Display::doing(detail, "sending");
        let artifact = context.store()?.snapshots().push(&digest, &self.reference, &display)?;
        output::print(&format!("{artifact}\n"))?;
        Ok(0)
    }
}
