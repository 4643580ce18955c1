//! The OCI image layout: `index.json`, and blobs by digest.

use serde::Deserialize;

use super::files::Files;
use super::{ArchivedImage, Error};
use crate::blob::digest::Digest;
use crate::image::manifest::{self, DEEPEST, Descriptor, Document, Index};
use crate::image::platform::Platform;
use crate::image::reference::{ArchiveFormat, Reference, is_tag};

pub(super) const INDEX: &str = "index.json";
const MARKER: &str = "oci-layout";

#[derive(Deserialize)]
struct IndexDocument {
    manifests: Vec<Descriptor>,
}

pub(super) fn images(
    files: &Files,
    format: ArchiveFormat,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Vec<ArchivedImage>, Error> {
    let path = files.path().to_owned();
    if !files.has(INDEX) || (!files.has(MARKER) && format != ArchiveFormat::DockerArchive) {
        return Err(Error::NotThisFormat { path, file: INDEX, format: format.prefix() });
    }
    let bytes = files.read(INDEX, manifest::LARGEST)?;
    let json = |source| Error::Json { path: path.clone(), file: INDEX.to_owned(), source };
    let index: IndexDocument = serde_json::from_slice(&bytes).map_err(json)?;
    let mut entries: Vec<&Descriptor> =
        index.manifests.iter().filter(|entry| entry.annotations.attachment.is_none()).collect();
    if let Some(name) = name {
        let available = entries.iter().flat_map(|entry| written_names(entry)).map(str::to_owned).collect();
        entries.retain(|entry| is_called(entry, name));
        if entries.is_empty() {
            return Err(Error::NoSuchName { path, name: name.to_owned(), available });
        }
    }
    // Entries that differ only in their platform are one image.
    let mut groups: Vec<(Vec<Reference>, Vec<Descriptor>)> = Vec::new();
    for entry in entries {
        let names = names(entry, files);
        match groups.iter_mut().find(|(known, _)| *known == names) {
            Some((_, group)) if entry.platform.is_some() => group.push(entry.clone()),
            _ => groups.push((names, vec![entry.clone()])),
        }
    }
    groups.into_iter().map(|(names, group)| image(files, names, group, platform)).collect()
}

fn image(
    files: &Files,
    names: Vec<Reference>,
    group: Vec<Descriptor>,
    platform: &Platform,
) -> Result<ArchivedImage, Error> {
    let path = files.path();
    let unusable = |source| Error::Manifest { path: path.to_owned(), source };
    let mut index = Index { manifests: group };
    let mut target = None;
    for _ in 0..=DEEPEST {
        let chosen = match index.manifests.as_slice() {
            // An entry alone is taken by name, whatever platform it says; its configuration is checked later.
            [only] if target.is_none() => only,
            _ => index.choose(platform).map_err(unusable)?,
        };
        let digest = chosen.digest;
        let bytes = files.read(&blob_path(&digest), manifest::LARGEST)?;
        if Digest::of(&bytes) != digest {
            return Err(Error::WrongManifest { path: path.to_owned(), digest });
        }
        let document = manifest::parse(&bytes, &chosen.media_type).map_err(unusable)?;
        let target = *target.get_or_insert(digest);
        match document {
            Document::Index(next) => index = next,
            Document::Image(manifest) => {
                let blobs = [&manifest.config].into_iter().chain(&manifest.layers);
                let files = blobs.map(|blob| (blob.digest, blob_path(&blob.digest))).collect();
                return Ok(ArchivedImage { names, target, bytes, manifest: *manifest, files });
            }
        }
    }
    Err(unusable(manifest::Error::TooDeep))
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn written_names(entry: &Descriptor) -> impl Iterator<Item = &str> {
    let annotations = &entry.annotations;
    [annotations.containerd_name.as_deref(), annotations.ref_name.as_deref()].into_iter().flatten()
}

fn is_called(entry: &Descriptor, name: &str) -> bool {
    let wanted = name.parse::<Reference>().ok();
    written_names(entry)
        .any(|written| written == name || (wanted.is_some() && written.parse().ok() == wanted))
}

/// Whole names are taken as they are. A tag alone becomes that of an image called like the archive's file.
fn names(entry: &Descriptor, files: &Files) -> Vec<Reference> {
    if let Some(name) = &entry.annotations.containerd_name
        && let Ok(reference) = name.parse()
    {
        return vec![reference];
    }
    let Some(name) = &entry.annotations.ref_name else {
        return own_name(files, "latest").into_iter().collect();
    };
    if is_tag(name) { own_name(files, name) } else { name.parse().ok() }.into_iter().collect()
}

fn own_name(files: &Files, tag: &str) -> Option<Reference> {
    let absolute = std::path::absolute(files.path()).ok()?;
    let file = absolute.file_name()?.to_str()?.to_ascii_lowercase();
    let stem =
        [".tar.gz", ".tgz", ".tar", ".oci"].iter().find_map(|end| file.strip_suffix(end)).unwrap_or(&file);
    format!("{stem}:{tag}").parse().ok()
}
