//! `imp template import`

use anyhow::anyhow;
use clap::Args;
use imp_embedded::name::TemplateName;
use imp_storage::image::reference::Source;

use super::carry::Bringing;
use crate::commands::run::flags::Pull;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::Detail;

/// Take a template from files that another machine exported
///
/// It is taken only if VMs can be made of it here: the same VMM of the same version, the same kind of processor, the same
/// guest kernel installed. The image below it is pulled if it is not here.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// What leads to the template from then on
    #[arg(value_name = "NAME")]
    name: TemplateName,
    /// `oci:DIR` or `oci-archive:FILE`, and `:NAME` behind it to take one of several
    #[arg(value_name = "ARCHIVE")]
    archive: String,
    /// Whether the image below the template is pulled
    #[arg(long, value_enum, value_name = "WHEN", default_value = "missing")]
    pull: Pull,
    /// No progress: only the digest
    #[arg(short, long)]
    quiet: bool,
}

impl Import {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let Source::Archive(archive) = self.archive.parse::<Source>()? else {
            let hint =
                "write oci:DIR or oci-archive:FILE, or take it from a registry with `imp template pull`";
            return Err(anyhow!("{:?} is no archive: {hint}", self.archive).into());
        };
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let bringing = Bringing { name: self.name, image: self.pull.into(), detail };
        let digest = bringing.bring(context, |snapshots, progress| snapshots.import(&archive, progress))?;
        output::print(&format!("{digest}\n"))?;
        Ok(0)
    }
}
