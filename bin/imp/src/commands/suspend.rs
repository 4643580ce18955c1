//! `imp suspend`, and the list of what is put away.

use std::time::SystemTime;

use clap::Args;
use imp_embedded::report;
use imp_runtime::{Digest, WithSecrets};
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
    /// Also if they hold secrets: these are on disk then
    #[arg(long)]
    with_secrets: bool,
}

impl Suspend {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let secrets = if self.with_secrets { WithSecrets::Allowed } else { WithSecrets::Refused };
        each(context, &self.vms, |owner, vm| async move { Ok(owner.suspend(vm, secrets).await?.0) })
    }
}

/// A VM that is put away, as it is listed.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    name: String,
    /// Of the snapshot.
    digest: Digest,
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
            digest: suspended.snapshot,
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
            self.digest.short(),
            self.image.clone(),
            show_bytes(self.memory_bytes),
            self.age.clone(),
            show_bytes(self.size),
        ]
    }

    fn id(&self) -> String {
        self.digest.to_string()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
