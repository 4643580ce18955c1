//! Every path of an image store.
//!
//! ```text
//! <root>/format                       the version of this layout
//! <root>/lock                         shared by who uses or records something, exclusive for who removes
//! <root>/blobs/sha256/<hex>           verified content
//! <root>/partial/…                    files on their way to their names
//! <root>/images/<hex>.json            one complete image
//! <root>/names/<hex of name>.json     what a name means
//! <root>/disks/<hex>.ext4, .lock      a base disk, and who is making it
//! <root>/used/<hex>                   its time is when an image or disk was used last
//! <root>/pins/<owner>@<hex>           what must stay
//! <root>/leases/<process>-<random>    what a living operation uses
//! ```

use std::path::{Path, PathBuf};

use crate::blob::digest::Digest;
use crate::image::reference::Reference;

#[derive(Debug, Clone)]
pub(super) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn format(&self) -> PathBuf {
        self.root.join("format")
    }

    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(super) fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(super) fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(super) fn image(&self, digest: &Digest) -> PathBuf {
        self.images().join(format!("{}.json", digest.hex()))
    }

    pub(super) fn names(&self) -> PathBuf {
        self.root.join("names")
    }

    /// A name is longer than a file's may be, and has slashes: its digest stands for it.
    pub(super) fn name(&self, reference: &Reference) -> PathBuf {
        self.names().join(format!("{}.json", Digest::of(reference.to_string().as_bytes()).hex()))
    }

    pub(super) fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    pub(super) fn disk(&self, key: &Digest) -> PathBuf {
        self.disks().join(format!("{}.ext4", key.hex()))
    }

    pub(super) fn disk_lock(&self, key: &Digest) -> PathBuf {
        self.disks().join(format!("{}.lock", key.hex()))
    }

    pub(super) fn used_times(&self) -> PathBuf {
        self.root.join("used")
    }

    pub(super) fn used(&self, digest: &Digest) -> PathBuf {
        self.used_times().join(digest.hex())
    }

    pub(super) fn pins(&self) -> PathBuf {
        self.root.join("pins")
    }

    pub(super) fn pin(&self, key: &Digest, owner: &str) -> PathBuf {
        self.pins().join(format!("{owner}@{}", key.hex()))
    }

    pub(super) fn leases(&self) -> PathBuf {
        self.root.join("leases")
    }

    pub(super) fn directories(&self) -> [PathBuf; 8] {
        [
            self.blobs(),
            self.partial(),
            self.images(),
            self.names(),
            self.disks(),
            self.used_times(),
            self.pins(),
            self.leases(),
        ]
    }
}
