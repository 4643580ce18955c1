//! `imp image import`

use anyhow::anyhow;
use clap::Args;
use imp_storage::image::reference::Source;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::{Detail, Display};

/// Take images from archives, and build their disks
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// `oci:DIR`, `oci-archive:FILE` or `docker-archive:FILE`, and `:NAME` behind it to take one of several images
    #[arg(required = true, value_name = "ARCHIVE")]
    archives: Vec<String>,
    /// No progress: only the digests
    #[arg(short, long)]
    quiet: bool,
}

impl Import {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let store = context.store()?;
        let display = Display::new(if self.quiet { Detail::Quiet } else { Detail::Shown });
        for archive in &self.archives {
            let Source::Archive(archive) = archive.parse::<Source>()? else {
                let hint = "write oci:DIR, oci-archive:FILE or docker-archive:FILE";
                return Err(anyhow!("{archive:?} is no archive: {hint}").into());
            };
            for image in store.import(&archive, &display)? {
                output::print(&format!("{}\n", image.digest))?;
            }
        }
        Ok(0)
    }
}
