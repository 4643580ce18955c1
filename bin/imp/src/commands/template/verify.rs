//! `imp template verify`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;

/// Hash all of templates again, and say what is damaged
#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Name, or the beginning of a digest
    #[arg(required = true, value_name = "TEMPLATE")]
    templates: Vec<String>,
}

impl Verify {
    pub(super) fn run(self, context: &Context) -> Outcome {
        each(context, &self.templates, |owner, template| async move {
            Ok(format!("{}: good", owner.verify_template(template).await?))
        })
    }
}
