//! `imp template inspect`

use std::time::SystemTime;

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
        let found = context.block_on(async {
            let owner = context.owner().await?;
            let mut found = Vec::new();
            for template in &self.templates {
                found.push(Shown::new(owner.template(template).await?, now));
            }
            anyhow::Ok(found)
        })??;
        output::print(&output::json(&found))?;
        Ok(0)
    }
}
