//! `imp template export`

use anyhow::anyhow;
use clap::Args;
use imp_storage::image::reference::Source;

use super::carry;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::{Detail, Display};

/// Write a template into files that other machines import
///
/// They are an OCI artifact, in a directory or in one file, as many tools carry them. What a directory has already is not
/// written again. The image below the template is not part of it: the other machine pulls that, or has it. Prints the
/// digest of the artifact.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Name, or the beginning of a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// `oci:DIR` or `oci-archive:FILE`, and `:NAME` behind it to tell it from others in there
    #[arg(value_name = "ARCHIVE")]
    archive: String,
    /// No progress: only the digest
    #[arg(short, long)]
    quiet: bool,
}

impl Export {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let Source::Archive(archive) = self.archive.parse::<Source>()? else {
            let hint = "write oci:DIR or oci-archive:FILE, or send it to a registry with `imp template push`";
            return Err(anyhow!("{:?} is no archive: {hint}", self.archive).into());
        };
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let digest = carry::find(context, &self.template)?;
        let display = Display::doing(detail, "writing");
        let artifact = context.store()?.snapshots().export(&digest, &archive, &display)?;
        output::print(&format!("{artifact}\n"))?;
        Ok(0)
    }
}
