//! Builds a base disk from layers in a directory of its own, and checks what came out.

use std::path::Path;
use std::process::Command;

use imp_storage::blob::digest::Digest;
use imp_storage::image::base::{
    BaseOptions, BaseReport, Error, LayerSource, Limits, Refusal, base_key, write_base,
};
use tempfile::TempDir;

use crate::ext4_reader::Image;
use crate::tar_builder::Tar;

pub(crate) const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
pub(crate) const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub(crate) const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

pub(crate) struct Workplace {
    pub(crate) directory: TempDir,
    pub(crate) layers: Vec<LayerSource>,
    pub(crate) limits: Limits,
}

impl Workplace {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), layers: Vec::new(), limits: Limits::default() }
    }

    pub(crate) fn layer(self, tar: Tar) -> Self {
        let bytes = tar.end();
        let diff_id = Digest::of(&bytes);
        self.blob(TAR, &bytes, Some(diff_id))
    }

    pub(crate) fn blob(mut self, media_type: &str, bytes: &[u8], diff_id: Option<Digest>) -> Self {
        let path = self.directory.path().join(format!("layer-{}", self.layers.len()));
        std::fs::write(&path, bytes).unwrap();
        let digest = Digest::of(bytes);
        self.layers.push(LayerSource { media_type: media_type.to_owned(), digest, diff_id, path });
        self
    }

    pub(crate) fn target(&self) -> std::path::PathBuf {
        self.directory.path().join("base.ext4")
    }

    pub(crate) fn try_build(&self) -> Result<BaseReport, Error> {
        let options = BaseOptions { key: base_key(&self.layers), limits: self.limits.clone() };
        write_base(&self.layers, &self.target(), &options, &mut |_| {})
    }

    /// The file system, checked and read back.
    pub(crate) fn build(&self) -> Image {
        self.try_build().unwrap();
        assert_clean(&self.target());
        Image::open(&self.target())
    }

    /// Builds what must be refused; nothing may be left of it.
    pub(crate) fn error(&self) -> Error {
        let error = self.try_build().unwrap_err();
        let left: Vec<_> = std::fs::read_dir(self.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with("layer-"))
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        error
    }

    pub(crate) fn refusal(&self) -> Refusal {
        match self.error() {
            Error::Entry { reason, .. } | Error::Layer { reason, .. } | Error::Image { reason } => reason,
            other => panic!("not a refusal: {other:?}"),
        }
    }
}

pub(crate) fn image(layers: impl IntoIterator<Item = Tar>) -> Image {
    layers.into_iter().fold(Workplace::new(), Workplace::layer).build()
}

pub(crate) fn refusal(layers: impl IntoIterator<Item = Tar>) -> Refusal {
    layers.into_iter().fold(Workplace::new(), Workplace::layer).refusal()
}

pub(crate) fn assert_clean(path: &Path) {
    let check = Command::new("e2fsck").arg("-fn").arg(path).output();
    let check = check.expect("e2fsck is installed: apt-get install e2fsprogs");
    let text = String::from_utf8_lossy(&check.stdout);
    assert!(check.status.success(), "{text}");
    // Optional improvements are questions, too, and do not change the exit status.
    assert!(!text.contains('?'), "{text}");
}
