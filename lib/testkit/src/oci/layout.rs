//! The OCI image layout: `oci-layout`, `index.json` and `blobs/sha256/`.

use std::fs;
use std::io::{self, BufWriter, Read, Seek as _, Write};
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::image::Image;
use super::layer::Layer;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Digests of what was written, each as `sha256:…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    pub manifest: String,
    pub config: String,
    /// Of the blobs, lowest layer first.
    pub layers: Vec<String>,
    /// Of the uncompressed layers.
    pub diff_ids: Vec<String>,
}

impl Image {
    /// Writes the image into the layout at `folder`, made if missing, under `tag`. Images already in it stay; an image
    /// of the same tag is replaced.
    pub fn write_layout(self, folder: &Path, tag: &str) -> anyhow::Result<Written> {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("making {}", blobs.display()))?;
        fs::write(folder.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let (written, manifest) = self.write_blobs(&blobs)?;
        add_to_index(folder, &manifest, tag)?;
        Ok(written)
    }

    /// Writes all blobs and returns their digests, and the descriptor of the manifest.
    fn write_blobs(mut self, blobs: &Path) -> anyhow::Result<(Written, Value)> {
        let (mut descriptors, mut layers, mut diff_ids) = (Vec::new(), Vec::new(), Vec::new());
        for layer in std::mem::take(&mut self.layers) {
            let (descriptor, digest, diff_id) = write_layer(layer, blobs)?;
            descriptors.push(descriptor);
            layers.push(digest);
            diff_ids.push(diff_id);
        }
        let config = write_document(blobs, CONFIG, &self.configuration(&diff_ids))?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": descriptors,
        });
        let mut descriptor = write_document(blobs, MANIFEST, &manifest)?;
        let (manifest, config) = (digest_of(&descriptor), digest_of(&config));
        if let Value::Object(fields) = &mut descriptor {
            fields.insert("platform".into(), json!({ "os": self.os, "architecture": self.architecture }));
        }
        Ok((Written { manifest, config, layers, diff_ids }, descriptor))
    }
}

/// Writes one layer's blob: its descriptor, its digest and the digest of its tar.
fn write_layer(layer: Layer, blobs: &Path) -> anyhow::Result<(Value, String, String)> {
    let compression = layer.compression;
    let media_type = layer.media_type.clone().unwrap_or_else(|| compression.media_type().to_owned());
    let mut tar = layer.open()?;
    let diff_id = digest(&mut tar)?;
    tar.rewind()?;

    let mut blob = tempfile::NamedTempFile::new_in(blobs)?;
    let mut hashed = Hashed::new(BufWriter::new(blob.as_file_mut()));
    compression.write(tar, &mut hashed)?;
    let (size, digest) = hashed.finish()?;
    blob.persist(blobs.join(file_name(&digest)))?;
    Ok((json!({ "mediaType": media_type, "digest": digest, "size": size }), digest, diff_id))
}

/// Writes a JSON document as a blob and returns its descriptor.
fn write_document(blobs: &Path, media_type: &str, document: &Value) -> anyhow::Result<Value> {
    let bytes = serde_json::to_vec(document)?;
    let digest = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
    fs::write(blobs.join(file_name(&digest)), &bytes)?;
    Ok(json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() }))
}

fn add_to_index(folder: &Path, manifest: &Value, tag: &str) -> anyhow::Result<()> {
    let path = folder.join("index.json");
    let mut manifests = match fs::read(&path) {
        Ok(bytes) => manifests_without(&serde_json::from_slice(&bytes)?, tag),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let mut named = manifest.clone();
    if let Value::Object(fields) = &mut named {
        fields.insert("annotations".into(), json!({ "org.opencontainers.image.ref.name": tag }));
    }
    manifests.push(named);
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    fs::write(path, serde_json::to_vec(&index)?)?;
    Ok(())
}

fn manifests_without(index: &Value, tag: &str) -> Vec<Value> {
    let named = |manifest: &&Value| {
        manifest.pointer("/annotations/org.opencontainers.image.ref.name").and_then(Value::as_str)
            != Some(tag)
    };
    index.get("manifests").and_then(Value::as_array).into_iter().flatten().filter(named).cloned().collect()
}

fn digest_of(descriptor: &Value) -> String {
    descriptor.get("digest").and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Name of a blob's file under `blobs/sha256`.
pub(super) fn file_name(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

/// SHA-256 of all that `from` still holds, as `sha256:…`.
pub(crate) fn digest(from: &mut impl Read) -> io::Result<String> {
    let mut hashed = Hashed::new(io::sink());
    io::copy(from, &mut hashed)?;
    Ok(hashed.finish()?.1)
}

/// A writer that counts and hashes what passes through it.
struct Hashed<W> {
    to: W,
    hash: Sha256,
    size: u64,
}

impl<W: Write> Hashed<W> {
    fn new(to: W) -> Self {
        Self { to, hash: Sha256::new(), size: 0 }
    }

    fn finish(mut self) -> io::Result<(u64, String)> {
        self.to.flush()?;
        Ok((self.size, format!("sha256:{}", hex::encode(self.hash.finalize()))))
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.to.write(buffer)?;
        self.hash.update(buffer.get(..written).unwrap_or_default());
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::oci::Compression;

    fn image() -> Image {
        let base = Layer::new()
            .directory("etc", 0o755)
            .file("etc/motd", 0o644, b"hello\n")
            .symlink("bin", "usr/bin");
        let top = Layer::new().whiteout("etc/motd").compressed(Compression::Zstd);
        Image::new().layer(base).layer(top).entrypoint(&["/bin/true"]).env("A=1").env("B=2")
    }

    fn read(folder: &Path, path: &str) -> Value {
        serde_json::from_slice(&fs::read(folder.join(path)).unwrap()).unwrap()
    }

    #[test]
    fn the_same_image_has_the_same_digests() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = image().write_layout(one.path(), "a").unwrap();
        let second = image().write_layout(two.path(), "b").unwrap();
        assert_eq!(first, second);
    }

    #[test]
    fn every_blob_is_named_by_its_digest_and_listed_with_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let written = image().write_layout(folder.path(), "latest").unwrap();
        let manifest = read(folder.path(), &format!("blobs/sha256/{}", file_name(&written.manifest)));
        for (layer, name) in manifest["layers"].as_array().unwrap().iter().zip(&written.layers) {
            let path = folder.path().join("blobs/sha256").join(file_name(name));
            assert_eq!(layer["size"].as_u64().unwrap(), fs::metadata(&path).unwrap().len());
            assert_eq!(&digest(&mut File::open(path).unwrap()).unwrap(), name);
        }
        let config = read(folder.path(), &format!("blobs/sha256/{}", file_name(&written.config)));
        assert_eq!(config["config"]["Env"], json!(["A=1", "B=2"]));
        assert_eq!(config["rootfs"]["diff_ids"], json!(written.diff_ids));
    }

    #[test]
    fn a_tag_is_replaced_and_other_tags_stay() {
        let folder = tempfile::tempdir().unwrap();
        image().write_layout(folder.path(), "a").unwrap();
        image().write_layout(folder.path(), "b").unwrap();
        let last = image().user("nobody").write_layout(folder.path(), "a").unwrap();
        let index = read(folder.path(), "index.json");
        let manifests = index["manifests"].as_array().unwrap();
        assert_eq!(manifests.len(), 2);
        assert!(manifests.iter().any(|manifest| manifest["digest"] == json!(last.manifest)));
    }

    #[test]
    fn every_compression_reads_back_as_the_same_tar() {
        let tar: Vec<u8> = (0..300_000u32).map(|number| (number % 251) as u8).collect();
        let bytes = |compression: Compression| {
            let mut blob = Vec::new();
            compression.write(tar.as_slice(), &mut blob).unwrap();
            blob
        };
        let mut gzip = Vec::new();
        flate2::read::MultiGzDecoder::new(bytes(Compression::Gzip).as_slice())
            .read_to_end(&mut gzip)
            .unwrap();
        let members = bytes(Compression::GzipMembers);
        let (mut all, mut first) = (Vec::new(), Vec::new());
        flate2::read::MultiGzDecoder::new(members.as_slice()).read_to_end(&mut all).unwrap();
        flate2::read::GzDecoder::new(members.as_slice()).read_to_end(&mut first).unwrap();
        assert!(gzip == tar && all == tar && bytes(Compression::None) == tar);
        assert!(first.len() < tar.len(), "the layer is in one member");
        assert!(zstd::decode_all(bytes(Compression::Zstd).as_slice()).unwrap() == tar);
    }
}
