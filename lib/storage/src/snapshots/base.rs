//! The base disk below a snapshot, which no snapshot carries: found here, or made of the image that the manifest names.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use crate::blob::digest::Digest;
use crate::image::reference::Reference;
use crate::progress::Progress;
use crate::store::{self, BaseDisk, Image, PullPolicy, Store};

/// An image of which a base disk is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseImage {
    /// Of its manifest.
    pub digest: Digest,
    /// A name that it had where the snapshot was made; it may be nobody else's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
}

/// The text that `imp image pull` takes.
impl fmt::Display for BaseImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.in_registry() {
            Some(reference) => f.write_str(&reference.familiar()),
            None => self.digest.fmt(f),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "its base disk {} is not on this machine, and it does not say of which image that is made; build it here instead",
        .key.short()
    )]
    Unknown { key: Digest },
    #[error(
        "its base disk is made of an image that is not on this machine; get that first: imp image pull {image}"
    )]
    NotHere { image: Box<BaseImage> },
    #[error(
        "its base disk is made of the image {image}, which has no name in a registry; bring that image here first (imp image import)"
    )]
    Nameless { image: Box<BaseImage> },
    #[error(
        "its base disk is made of the image {image}, which could not be had; bring that here first (imp image pull, or imp image import)"
    )]
    Pull {
        image: Box<BaseImage>,
        #[source]
        source: Box<store::Error>,
    },
    #[error(
        "of the image {image} this version of imp makes another disk ({}) than the one below it ({}); build it here instead",
        .found.short(), .expected.short()
    )]
    Differs { image: Box<BaseImage>, expected: Digest, found: Digest },
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl BaseImage {
    /// By its digest: a tag may have moved on.
    fn in_registry(&self) -> Option<Reference> {
        let name = self.name.as_ref()?;
        format!("{}/{}@{}", name.domain(), name.repository(), self.digest).parse().ok()
    }
}

/// The disk; while it lives, nobody removes it.
pub(super) fn disk(
    store: &Store,
    manifest: &Manifest,
    policy: PullPolicy,
    progress: &dyn Progress,
) -> Result<BaseDisk, Error> {
    let key = manifest.description.base;
    if let Some(disk) = store.disk(&key)? {
        return Ok(disk);
    }
    let image = manifest.image.clone().ok_or(Error::Unknown { key })?;
    let taken = take(store, &image, policy, progress)?;
    let disk = store.base_disk(&taken, &[], progress)?;
    if disk.key == key {
        Ok(disk)
    } else {
        Err(Error::Differs { image: Box::new(image), expected: key, found: disk.key })
    }
}

fn take(
    store: &Store,
    image: &BaseImage,
    policy: PullPolicy,
    progress: &dyn Progress,
) -> Result<Image, Error> {
    match store.resolve(&image.digest.to_string()) {
        Ok(taken) => return Ok(taken),
        Err(store::Error::NoImage(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let Some(reference) = image.in_registry() else {
        return Err(Error::Nameless { image: Box::new(image.clone()) });
    };
    match policy {
        PullPolicy::Never => Err(Error::NotHere { image: Box::new(image.clone()) }),
        PullPolicy::Missing | PullPolicy::Always => store
            .pull(&reference, policy, progress)
            .map_err(|source| Error::Pull { image: Box::new(image.clone()), source: Box::new(source) }),
    }
}
