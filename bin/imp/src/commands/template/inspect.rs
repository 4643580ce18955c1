//! `imp template inspect`

use std::time::SystemTime;

use anyhow::bail;
use clap::Args;

use super::ls::Shown;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Show all that is known of templates, as JSON
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Name, or the beginning of a digest
    #[arg(required = true, value_name = "TEMPLATE")]
    templates: Vec<String>,
}

impl Inspect {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let now = SystemTime::now();
        let known = context.block_on(async { anyhow::Ok(context.owner().await?.templates().await?) })??;
        let known: Vec<Shown> = known.into_iter().map(|template| Shown::new(template, now)).collect();
        let found: Vec<&Shown> =
            self.templates.iter().map(|text| one(&known, text)).collect::<Result<_, _>>()?;
        output::print(&output::json(&found))?;
        Ok(0)
    }
}

/// Names win over digests.
fn one<'a>(known: &'a [Shown], text: &str) -> anyhow::Result<&'a Shown> {
    if let Some(named) = known.iter().find(|template| template.has_name(text)) {
        return Ok(named);
    }
    let mut fitting = known.iter().filter(|template| template.is(text));
    match (fitting.next(), fitting.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => bail!("{text:?} fits more than one template; type more of the digest"),
        (None, _) => bail!("there is no template {text:?}; `imp template ls` lists all"),
    }
}
