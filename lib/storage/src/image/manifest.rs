//! Image manifests and indexes of Docker and OCI: parsed within bounds, and the choice of a platform.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::config::{MOST_LAYERS, null_is_default};
use super::platform::Platform;
use crate::blob::digest::Digest;

/// Largest manifest or index that is read, bytes: what registries accept.
pub const LARGEST: u64 = 4 << 20;
/// Indexes within indexes.
pub const DEEPEST: usize = 4;
/// Most entries of an index.
const MOST_MANIFESTS: usize = 4096;
/// Largest blob that a descriptor may name, bytes.
const LARGEST_BLOB: u64 = 1 << 40;
/// Most addresses of one foreign layer.
const MOST_URLS: usize = 16;

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const SCHEMA_1: [&str; 2] = [
    "application/vnd.docker.distribution.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v1+prettyjws",
];
const LAYERS: [&str; 10] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
];

/// Everything that a registry may answer a request for a manifest with.
pub const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the manifest is not valid JSON of the OCI or Docker form")]
    Json(#[source] serde_json::Error),
    #[error("the manifest has {0} bytes, more than the {LARGEST} allowed")]
    TooLarge(u64),
    #[error(
        "the image has a manifest of the old schema 1, which was retired in 2017; ask its publisher to rebuild it, or push it again with a current tool"
    )]
    Schema1,
    #[error("media type {0:?} is not an image manifest or index that is known")]
    UnknownType(String),
    #[error(
        "media type {0:?} of the configuration is not that of a container image: this is another kind of artifact"
    )]
    NotAnImage(String),
    #[error("media type {0:?} is not a layer of a container image")]
    LayerType(String),
    #[error("the manifest names {0} layers, more than the {MOST_LAYERS} allowed")]
    Layers(usize),
    #[error("the index names {0} manifests, more than the {MOST_MANIFESTS} allowed")]
    Manifests(usize),
    #[error("the manifest gives blob {0} an impossible size")]
    BlobSize(Digest),
    #[error("the index leads through more than {DEEPEST} further indexes")]
    TooDeep,
    #[error("the image has nothing for {wanted}; it is there for: {available}")]
    Platform { wanted: Platform, available: Available },
}

/// The platforms for which an image exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available(pub Vec<Platform>);

impl fmt::Display for Available {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no platform at all");
        }
        for (position, platform) in self.0.iter().enumerate() {
            write!(f, "{}{platform}", if position == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Names a blob and says how large it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default, deserialize_with = "null_is_default")]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Where else the blob is, for layers that their publisher does not let registries keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub urls: Vec<String>,
    #[serde(default, skip_serializing_if = "Annotations::is_empty", deserialize_with = "null_is_default")]
    pub annotations: Annotations,
}

/// The annotations of a descriptor that mean something here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Annotations {
    /// A tag, or a whole name, in an image layout.
    #[serde(rename = "org.opencontainers.image.ref.name", skip_serializing_if = "Option::is_none")]
    pub ref_name: Option<String>,
    /// A whole name, as containerd and `docker save` write it.
    #[serde(rename = "io.containerd.image.name", skip_serializing_if = "Option::is_none")]
    pub containerd_name: Option<String>,
    /// What a builder attached to an image, such as its provenance; never something to run.
    #[serde(rename = "vnd.docker.reference.type", skip_serializing_if = "Option::is_none")]
    pub attachment: Option<String>,
}

impl Annotations {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What a manifest document turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    Image(Box<Manifest>),
    Index(Index),
}

/// One image for one platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub config: Descriptor,
    /// Lowest first.
    pub layers: Vec<Descriptor>,
}

/// The same image for several platforms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    pub manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    schema_version: u64,
    #[serde(default, deserialize_with = "null_is_default")]
    media_type: String,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

/// Just enough of a document to tell schema 1, whose other fields have another form.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    #[serde(default)]
    schema_version: u64,
}

/// Parses a manifest. `content_type` is what the registry or the descriptor said; it may be empty, and must not
/// contradict the document.
pub fn parse(bytes: &[u8], content_type: &str) -> Result<Document, Error> {
    let length = bytes.len() as u64;
    if length > LARGEST {
        return Err(Error::TooLarge(length));
    }
    let content_type = content_type.split(';').next().unwrap_or_default().trim();
    let version: Version = serde_json::from_slice(bytes).map_err(Error::Json)?;
    if SCHEMA_1.contains(&content_type) || version.schema_version == 1 {
        return Err(Error::Schema1);
    }
    let raw: Raw = serde_json::from_slice(bytes).map_err(Error::Json)?;
    if raw.schema_version != 2 {
        return Err(Error::UnknownType(format!("schema {}", raw.schema_version)));
    }
    // Registries serve some documents under a generic type; then the document speaks for itself.
    let generic = matches!(content_type, "" | "application/json" | "text/plain" | "application/octet-stream");
    let media_type = match (raw.media_type.as_str(), content_type) {
        ("", content_type) if !generic => content_type,
        (own, _) => own,
    };
    match (media_type, raw.manifests, raw.config, raw.layers) {
        (OCI_INDEX | DOCKER_LIST, Some(manifests), None, None) => index(manifests),
        ("", Some(manifests), None, None) => index(manifests),
        (OCI_MANIFEST | DOCKER_MANIFEST | "", None, Some(config), Some(layers)) => image(config, layers),
        (other, _, _, _) => Err(Error::UnknownType(other.chars().take(200).collect())),
    }
}

fn index(manifests: Vec<Descriptor>) -> Result<Document, Error> {
    if manifests.len() > MOST_MANIFESTS {
        return Err(Error::Manifests(manifests.len()));
    }
    manifests.iter().try_for_each(check)?;
    Ok(Document::Index(Index { manifests }))
}

fn image(config: Descriptor, layers: Vec<Descriptor>) -> Result<Document, Error> {
    if layers.len() > MOST_LAYERS {
        return Err(Error::Layers(layers.len()));
    }
    layers.iter().chain([&config]).try_for_each(check)?;
    if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG | "application/octet-stream" | "") {
        return Err(Error::NotAnImage(config.media_type));
    }
    if let Some(other) = layers.iter().find(|layer| !LAYERS.contains(&layer.media_type.as_str())) {
        return Err(Error::LayerType(other.media_type.clone()));
    }
    Ok(Document::Image(Box::new(Manifest { config, layers })))
}

fn check(descriptor: &Descriptor) -> Result<(), Error> {
    if descriptor.size > LARGEST_BLOB || descriptor.urls.len() > MOST_URLS {
        return Err(Error::BlobSize(descriptor.digest));
    }
    Ok(())
}

/// Whether registries are not supposed to keep this layer.
pub fn is_foreign(media_type: &str) -> bool {
    media_type.contains(".nondistributable.") || media_type.contains(".foreign.")
}

impl Index {
    /// The manifest that runs best on a machine; of equals the first. An entry that names no platform is taken only if it
    /// is the only entry that is not an attachment.
    pub fn choose(&self, machine: &Platform) -> Result<&Descriptor, Error> {
        let images = || self.manifests.iter().filter(|entry| entry.annotations.attachment.is_none());
        let mut best: Option<(u8, &Descriptor)> = None;
        for entry in images() {
            let Some(offered) = &entry.platform else { continue };
            let Some(fitness) = machine.fitness(&offered.clone().normal()) else { continue };
            if best.is_none_or(|(best, _)| fitness > best) {
                best = Some((fitness, entry));
            }
        }
        if let Some((_, entry)) = best {
            return Ok(entry);
        }
        let mut all = images();
        if let (Some(only), None) = (all.next(), all.next())
            && only.platform.is_none()
        {
            return Ok(only);
        }
        let mut available: Vec<Platform> = images()
            .filter_map(|entry| entry.platform.clone())
            .filter(|platform| platform.os != "unknown")
            .collect();
        available.sort();
        available.dedup();
        available.truncate(40);
        Err(Error::Platform { wanted: machine.clone(), available: Available(available) })
    }
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
