//! `imp template pull`

use anyhow::{Context as _, bail};
use clap::Args;
use imp_embedded::name::TemplateName;
use imp_runtime::Digest;
use imp_storage::image::reference::Reference;

use super::carry::Bringing;
use super::peer::From;
use crate::commands::run::flags;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::progress::Detail;

/// Take a template from a registry, or from another machine
///
/// What other templates here have of it is not fetched, and what was interrupted goes on where it was. It is taken only if
/// VMs can be made of it here, as for `imp template import`. The image below it is pulled if it is not here.
#[derive(Debug, Args)]
#[command(
    override_usage = "imp template pull [FLAGS] NAME REFERENCE\n       imp template pull [FLAGS] --peer HOST:PORT --certificate FILE --key FILE --authorities FILE NAME DIGEST"
)]
pub(crate) struct Pull {
    /// What leads to the template from then on
    #[arg(value_name = "NAME")]
    name: TemplateName,
    /// [REGISTRY/]REPOSITORY[:TAG][@DIGEST]; with --peer the whole digest, as `imp template ls -q` prints it there
    #[arg(value_name = "REFERENCE")]
    reference: String,
    #[command(flatten)]
    from: From,
    /// Whether the image below the template is pulled
    #[arg(long, value_enum, value_name = "WHEN", default_value = "missing")]
    pull: flags::Pull,
    /// No progress: only the digest
    #[arg(short, long)]
    quiet: bool,
}

impl Pull {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let detail = if self.quiet { Detail::Quiet } else { Detail::Shown };
        let bringing = Bringing { name: self.name.clone(), image: self.pull.into(), detail };
        let digest = match self.from.peer()? {
            Some(peer) => {
                let digest = whole(&self.reference)?;
                bringing.bring(context, |snapshots, progress| snapshots.fetch(&digest, &peer, progress))?
            }
            None => {
                let reference: Reference = self.reference.parse()?;
                bringing.bring(context, |snapshots, progress| snapshots.pull(&reference, progress))?
            }
        };
        output::print(&format!("{digest}\n"))?;
        Ok(0)
    }
}

fn whole(text: &str) -> anyhow::Result<Digest> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    if hex.len() != 64 {
        bail!("a peer is asked for a whole digest, not for {text:?}: `imp template ls -q` prints it there");
    }
    format!("sha256:{hex}").parse().with_context(|| format!("{text:?} is no digest"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_asked_for_a_whole_digest() {
        let digest = Digest::of(b"x");
        assert_eq!(whole(&digest.to_string()).unwrap(), digest);
        assert_eq!(whole(digest.hex().as_str()).unwrap(), digest);
        for bad in ["web", "sha256:ab", &"z".repeat(64)] {
            assert!(whole(bad).is_err(), "{bad}");
        }
    }
}
