//! `imp template rm`

use clap::Args;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// Remove templates of which no VM is made
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name, or the beginning of a digest; all its names go with it
    #[arg(required = true, value_name = "TEMPLATE")]
    templates: Vec<String>,
}

impl Rm {
    pub(super) fn run(self, context: &Context) -> Outcome {
        each(context, &self.templates, |owner, template| async move {
            let (digest, bytes) = owner.remove_template(template).await?;
            output::say(&format!("{} free again", show_bytes(bytes)));
            Ok(digest.to_string())
        })
    }
}
