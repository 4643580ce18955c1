//! `imp template ls`

use std::time::SystemTime;

use clap::Args;
use imp_embedded::report::Template;
use imp_runtime::Digest;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{Listing, Row};
use crate::value::{show_age, show_bytes, show_time};

/// List templates
#[derive(Debug, Args)]
#[command(visible_alias = "list")]
pub(crate) struct Ls {
    #[command(flatten)]
    listing: Listing,
}

/// A template as it is listed.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    names: Vec<String>,
    /// Of the snapshot.
    digest: Digest,
    /// Of all that it was made of; absent: a newer one has been made of the same.
    made_of: Option<Digest>,
    image: String,
    command: String,
    vmm: String,
    cpus: u32,
    memory_bytes: u64,
    disk_bytes: u64,
    /// On disk.
    size: u64,
    made: String,
    last_used: String,
    /// Ids of VMs, and what else keeps it.
    used_by: Vec<String>,
    #[serde(skip)]
    age: String,
}

impl Shown {
    pub(super) fn new(template: Template, now: SystemTime) -> Self {
        Self {
            names: template.names,
            digest: template.snapshot,
            made_of: template.template,
            image: template.image,
            command: template.command,
            vmm: template.vmm,
            cpus: template.cpus,
            memory_bytes: template.memory_bytes,
            disk_bytes: template.scratch_bytes,
            size: template.bytes,
            made: show_time(template.made),
            last_used: show_time(template.last_used),
            used_by: template.used_by,
            age: show_age(template.made, now),
        }
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] =
        &["TEMPLATE", "DIGEST", "IMAGE", "MEMORY", "VMM", "MADE", "SIZE", "USES"];

    fn cells(&self) -> Vec<String> {
        let names = if self.names.is_empty() { "<none>".to_owned() } else { self.names.join(", ") };
        vec![
            names,
            self.digest.short(),
            self.image.clone(),
            show_bytes(self.memory_bytes),
            self.vmm.clone(),
            self.age.clone(),
            show_bytes(self.size),
            self.used_by.len().to_string(),
        ]
    }

    fn id(&self) -> String {
        self.digest.to_string()
    }

    fn name(&self) -> String {
        self.names.first().cloned().unwrap_or_else(|| self.id())
    }
}

impl Ls {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let now = SystemTime::now();
        let templates =
            context.block_on(async { anyhow::Ok(context.owner().await?.templates().await?) })??;
        let shown = templates.into_iter().map(|template| Shown::new(template, now));
        self.listing.print(&shown.collect::<Vec<_>>())?;
        Ok(0)
    }
}
