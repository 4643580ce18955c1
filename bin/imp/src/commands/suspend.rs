//! `imp suspend`, and the list of what is put away.

use std::time::SystemTime;

use clap::Args;
use imp_embedded::report;
use serde::Serialize;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output::Row;
use crate::value::{show_age, show_bytes, show_time};

/// Put VMs away on disk until `imp resume`: they take neither memory nor processors meanwhile
///
/// Each goes on later as the machine that it was, under its name. What its program has said before is gone then.
#[derive(Debug, Args)]
pub(crate) struct Suspend {
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Suspend {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        each(context, &self.vms, |owner, vm| async move { Ok(owner.suspend(vm).await?.0) })
    }
}

/// A VM that is put away, as it is listed.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    name: String,
    /// Of the snapshot.
    digest: String,
    image: String,
    memory_bytes: u64,
    /// On disk.
    size: u64,
    since: String,
    #[serde(skip)]
    age: String,
}

impl Shown {
    pub(crate) fn new(suspended: report::Suspended, now: SystemTime) -> Self {
        Self {
            name: suspended.name,
            digest: suspended.snapshot.to_string(),
            image: suspended.image,
            memory_bytes: suspended.memory_bytes,
            size: suspended.bytes,
            since: show_time(suspended.since),
            age: show_age(suspended.since, now),
        }
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] = &["NAME", "DIGEST", "IMAGE", "MEMORY", "SUSPENDED", "SIZE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.digest.trim_start_matches("sha256:").chars().take(12).collect(),
            self.image.clone(),
            show_bytes(self.memory_bytes),
            self.age.clone(),
            show_bytes(self.size),
        ]
    }

    fn id(&self) -> String {
        self.digest.clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
