//! What `docker save` writes: `manifest.json`, which names the files of the configuration and the layers. Newer versions
//! put those where an OCI layout has its blobs, which changes nothing here.

use std::io::Read;

use serde::Deserialize;
use serde_json::json;

use super::files::Files;
use super::{ArchivedImage, Error, READ_SIZE};
use crate::blob::digest::{Digest, Hasher};
use crate::image::config::{self, ImageConfig, MOST_LAYERS, null_is_default};
use crate::image::manifest::{self, Document};
use crate::image::reference::Reference;

pub(super) const MANIFEST: &str = "manifest.json";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    #[serde(default, deserialize_with = "null_is_default")]
    repo_tags: Vec<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    layers: Vec<String>,
}

pub(super) fn images(files: &Files, name: Option<&str>) -> Result<Vec<ArchivedImage>, Error> {
    let path = files.path().to_owned();
    let bytes = files.read(MANIFEST, manifest::LARGEST)?;
    let json = |source| Error::Json { path: path.clone(), file: MANIFEST.to_owned(), source };
    let mut entries: Vec<Entry> = serde_json::from_slice(&bytes).map_err(json)?;
    if let Some(name) = name {
        let available = entries.iter().flat_map(|entry| entry.repo_tags.clone()).collect();
        let wanted = name.parse::<Reference>().ok();
        let is_wanted = |tag: &String| tag == name || (wanted.is_some() && tag.parse().ok() == wanted);
        entries.retain(|entry| entry.repo_tags.iter().any(is_wanted));
        if entries.is_empty() {
            return Err(Error::NoSuchName { path, name: name.to_owned(), available });
        }
    }
    entries.iter().map(|entry| image(files, entry)).collect()
}

/// Makes the manifest that a registry would have for this image.
fn image(files: &Files, entry: &Entry) -> Result<ArchivedImage, Error> {
    let path = files.path();
    let unusable = |source| Error::Manifest { path: path.to_owned(), source };
    if entry.layers.len() > MOST_LAYERS {
        return Err(unusable(manifest::Error::Layers(entry.layers.len())));
    }
    let config = files.read(&entry.config, config::LARGEST)?;
    let parsed =
        ImageConfig::parse(&config).map_err(|source| Error::Config { path: path.to_owned(), source })?;
    let mut found = vec![(Digest::of(&config), entry.config.clone())];
    let mut layers = Vec::new();
    for (position, file) in entry.layers.iter().enumerate() {
        let layer = layer(files, file, parsed.diff_ids.get(position))?;
        found.push((layer.digest, file.clone()));
        layers.push(json!({ "mediaType": layer.media_type, "digest": layer.digest, "size": layer.size }));
    }
    let document = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": Digest::of(&config),
            "size": config.len(),
        },
        "layers": layers,
    });
    let bytes = document.to_string().into_bytes();
    let Document::Image(manifest) = manifest::parse(&bytes, "").map_err(unusable)? else {
        return Err(unusable(manifest::Error::UnknownType(String::new())));
    };
    let names = entry.repo_tags.iter().filter_map(|tag| tag.parse().ok()).collect();
    Ok(ArchivedImage { names, target: Digest::of(&bytes), bytes, manifest: *manifest, files: found })
}

struct Layer {
    media_type: &'static str,
    digest: Digest,
    size: u64,
}

/// An uncompressed layer has the digest that the configuration promises, which is verified when it is copied. Of a
/// compressed one the digest must be computed first.
fn layer(files: &Files, file: &str, diff_id: Option<&Digest>) -> Result<Layer, Error> {
    let (mut reader, size) = files.open(file)?;
    let mut start = Vec::new();
    let read = |source| Error::Read { path: files.path().to_owned(), source };
    reader.by_ref().take(4).read_to_end(&mut start).map_err(read)?;
    let media_type = match start.as_slice() {
        [0x1f, 0x8b, ..] => "application/vnd.oci.image.layer.v1.tar+gzip",
        [0x28, 0xb5, 0x2f, 0xfd] => "application/vnd.oci.image.layer.v1.tar+zstd",
        _ => "application/vnd.oci.image.layer.v1.tar",
    };
    if let (Some(diff_id), "application/vnd.oci.image.layer.v1.tar") = (diff_id, media_type) {
        return Ok(Layer { media_type, digest: *diff_id, size });
    }
    let mut hasher = Hasher::default();
    hasher.update(&start);
    let mut buffer = vec![0; READ_SIZE];
    loop {
        let count = reader.read(&mut buffer).map_err(read)?;
        if count == 0 {
            return Ok(Layer { media_type, digest: hasher.finish(), size });
        }
        hasher.update(buffer.get(..count).unwrap_or_default());
    }
}
