//! Where an image comes from: the store, a registry, or an archive.

use anyhow::Context as _;
use imp_storage::image::reference::{Archive, Reference, Source};
use imp_storage::store::{Image, PullPolicy, Store};

use crate::commands::run::flags::Pull;
use crate::progress::{Detail, Display};

impl From<Pull> for PullPolicy {
    fn from(pull: Pull) -> Self {
        match pull {
            Pull::Always => Self::Always,
            Pull::Missing => Self::Missing,
            Pull::Never => Self::Never,
        }
    }
}

/// The image that `text` names, brought here if the policy says so.
pub(crate) fn take(store: &Store, text: &str, policy: PullPolicy, detail: Detail) -> anyhow::Result<Image> {
    // The start of a digest is no name in a registry, but may be an image that is here.
    if is_digest(text)
        && let Ok(image) = store.resolve(text)
    {
        return Ok(image);
    }
    match text.parse::<Source>()? {
        Source::Registry(reference) => pull(store, &reference, policy, detail),
        Source::Archive(archive) => import_one(store, &archive, detail),
    }
}

fn is_digest(text: &str) -> bool {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    (6..=64).contains(&hex.len()) && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub(crate) fn pull(
    store: &Store,
    reference: &Reference,
    policy: PullPolicy,
    detail: Detail,
) -> anyhow::Result<Image> {
    Ok(store.pull(reference, policy, &Display::new(detail))?)
}

fn import_one(store: &Store, archive: &Archive, detail: Detail) -> anyhow::Result<Image> {
    let images = store.import(archive, &Display::new(detail))?;
    anyhow::ensure!(
        images.len() == 1,
        "{} holds {} images; say which, with `:NAME` behind the path",
        archive.path.display(),
        images.len()
    );
    images.into_iter().next().context("the archive holds no image")
}
