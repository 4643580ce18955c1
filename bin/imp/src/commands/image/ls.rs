//! `imp image ls`

use std::time::SystemTime;

use clap::Args;
use imp_runtime::Digest;
use imp_storage::store::ImageSummary;
use serde::Serialize;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output::{Listing, Row};
use crate::value::{show_age, show_bytes, show_time};

/// List the images that are here
#[derive(Debug, Args)]
#[command(visible_alias = "list")]
pub(crate) struct Ls {
    #[command(flatten)]
    listing: Listing,
}

/// An image as it is listed.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    names: Vec<String>,
    digest: Digest,
    platform: String,
    created: Option<String>,
    stored: String,
    last_used: String,
    /// Bytes of the compressed layers.
    size: u64,
    /// Bytes of the disks made of it.
    disk_size: u64,
    pinned_by: Vec<String>,
    #[serde(skip)]
    age: String,
}

impl Shown {
    fn new(image: ImageSummary, now: SystemTime) -> Self {
        Self {
            names: image.names.iter().map(|name| name.familiar()).collect(),
            digest: image.digest,
            platform: image.platform.to_string(),
            created: image.created,
            stored: show_time(image.stored),
            last_used: show_time(image.last_used),
            size: image.size,
            disk_size: image.disk_size,
            pinned_by: image.pinned_by,
            age: show_age(image.stored, now),
        }
    }
}

impl Row for Shown {
    const HEADINGS: &'static [&'static str] = &["IMAGE", "DIGEST", "PLATFORM", "STORED", "SIZE", "DISK"];

    fn cells(&self) -> Vec<String> {
        let names = if self.names.is_empty() { "<none>".to_owned() } else { self.names.join(", ") };
        let disk = if self.disk_size == 0 { "-".to_owned() } else { show_bytes(self.disk_size) };
        vec![names, self.digest.short(), self.platform.clone(), self.age.clone(), show_bytes(self.size), disk]
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
        let images: Vec<Shown> =
            context.store()?.images()?.into_iter().map(|image| Shown::new(image, now)).collect();
        self.listing.print(&images)?;
        Ok(0)
    }
}
