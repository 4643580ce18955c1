//! Turns the layers of an image into its base disk: a read-only ext4 file system, written as the layers stream past.

mod acl;
mod build;
mod error;
mod layers;
mod limits;
mod merge;
mod path;
mod tar;

use std::path::{Path, PathBuf};

pub use error::{Error, Refusal};
pub use layers::Compression;
pub use limits::Limits;

use self::build::Build;
use crate::blob::digest::Digest;
use crate::disk::partial::Partial;
use crate::ext4::{self, Identity, Mode, Writer};

/// One layer of an image, lowest first in every list.
#[derive(Clone, Debug)]
pub struct LayerSource {
    /// The media type that the manifest gives; it decides the compression.
    pub media_type: String,
    /// Of the blob as stored; names the layer in errors.
    pub digest: Digest,
    /// Of the uncompressed tar, when the image configuration is known; verified while the layer streams.
    pub diff_id: Option<Digest>,
    /// The blob in the store.
    pub path: PathBuf,
}

#[derive(Clone, Debug)]
pub struct BaseOptions {
    /// What [`base_key`] gave: the file system's UUID and hash seed come from it.
    pub key: Digest,
    pub limits: Limits,
}

/// How far a build is: bytes of the stored (compressed) layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseProgress {
    pub layer: usize,
    pub layers: usize,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseReport {
    /// Apparent size of the disk; what it occupies is less by its holes.
    pub disk_bytes: u64,
    /// Entries of all layers.
    pub entries: u64,
    /// Files, directories and all else in the merged tree.
    pub nodes: u64,
    /// Extended attributes that no guest could use: those of the host's own overlay mounts, and unknown kinds.
    pub xattrs_dropped: u64,
    /// The diff id of each layer, as computed, lowest first.
    pub diff_ids: Vec<Digest>,
}

/// Writes the base disk of `layers` (lowest first) to `path`, which appears complete or not at all.
///
/// The file is made under a temporary name in the same directory (see [`crate::disk::remove_leftovers`]), synced and
/// renamed. Blocking; a second thread unpacks.
pub fn write_base(
    layers: &[LayerSource],
    path: &Path,
    options: &BaseOptions,
    progress: &mut dyn FnMut(BaseProgress),
) -> Result<BaseReport, Error> {
    let unwritable = |source| build::write_error(path, source);
    let partial = Partial::create(path).map_err(unwritable)?;
    let file = partial.file().try_clone().map_err(unwritable)?;
    let bytes_total = total_bytes(layers)?;
    let mut diff_ids = Vec::with_capacity(layers.len());
    let mut build = Build::new(Writer::new(file, options.limits.disk_bytes), &options.limits, path);
    std::thread::scope(|scope| {
        let (unpacker, mut unpacked) = layers::pipe();
        scope.spawn(|| unpacker.run(layers, &options.limits));
        for (position, layer) in layers.iter().enumerate() {
            let report =
                |bytes_done| BaseProgress { layer: position, layers: layers.len(), bytes_done, bytes_total };
            let diff_id = build.layer(layer, &mut unpacked, &mut |done| progress(report(done)))?;
            progress(report(unpacked.bytes_read()));
            diff_ids.push(diff_id);
        }
        Ok(())
    })?;
    let built = build.end();
    let nodes = built.tree.living();
    let finished = built.writer.finish(&built.tree, &identity(options.key), Mode::ReadOnly);
    let finished = finished.map_err(|error| match error {
        ext4::Error::Io(source) => unwritable(source),
        ext4::Error::Full { .. } => Error::Image { reason: Refusal::Disk(options.limits.disk_bytes) },
    })?;
    partial.commit().map_err(unwritable)?;
    let (disk_bytes, xattrs_dropped) = (finished.bytes, built.xattrs_dropped);
    Ok(BaseReport { disk_bytes, entries: built.entries, nodes, xattrs_dropped, diff_ids })
}

/// The digest over everything that decides the bytes of a base disk.
///
/// A layer counts with its diff id; one whose diff id is unknown with the digest of its blob.
pub fn base_key(layers: &[LayerSource]) -> Digest {
    let mut inputs = format!("imp base disk, format {FORMAT}\n");
    for layer in layers {
        let (kind, digest) = layer.diff_id.map_or(("blob", layer.digest), |diff_id| ("tar", diff_id));
        inputs.push_str(&format!("{kind} {digest}\n"));
    }
    Digest::of(inputs.as_bytes())
}

/// Counts up whenever the same layers would give other bytes.
const FORMAT: u32 = 2;

fn identity(key: Digest) -> Identity {
    let (uuid, hash_seed) = key.as_bytes().split_at(16);
    let mut uuid: [u8; 16] = uuid.try_into().expect("half of 32 bytes");
    let [_, _, _, _, _, _, version, _, variant, ..] = &mut uuid;
    // Version 8 of RFC 9562: made by a rule of our own.
    *version = (*version & 0x0f) | 0x80;
    *variant = (*variant & 0x3f) | 0x80;
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(hash_seed.chunks_exact(4)) {
        *word = u32::from_le_bytes(bytes.try_into().expect("a quarter of 16 bytes"));
    }
    Identity { uuid, hash_seed: words }
}

fn total_bytes(layers: &[LayerSource]) -> Result<u64, Error> {
    layers.iter().try_fold(0, |sum, layer| {
        let unreadable = |source| Error::Read { layer: layer.digest, path: layer.path.clone(), source };
        Ok(sum + std::fs::metadata(&layer.path).map_err(unreadable)?.len())
    })
}
