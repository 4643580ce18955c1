//! Every path of a store.
//!
//! ```text
//! <root>/format                       the version of this layout
//! <root>/lock                         shared by who uses or records something, exclusive for who removes
//! <root>/blobs/sha256/<hex>           verified content
//! <root>/partial/…                    files on their way to their names
//! <root>/images/<hex>.json            one complete image
//! <root>/names/<hex of name>.json     what a name means
//! <root>/disks/<hex>.ext4, .lock      a base disk, and who is making it
//! <root>/snapshots/<hex>/             a snapshot: manifest.json, and for each part its file and its index of chunks
//! <root>/templates/<hex>.json         which snapshot was made of what the template's digest stands for
//! <root>/verified/<hex>.json          that a snapshot was verified here, and by what its files are known since
//! <root>/drafts/<process>-<random>/   a snapshot that is being made or removed; .lock beside it tells whether by a living process
//! <root>/arriving/<hex>/              a snapshot that comes from elsewhere, and what has arrived of it
//! <root>/used/<hex>                   its time is when an image, disk or snapshot was used last
//! <root>/pins/<owner>@<hex>           what must stay
//! <root>/leases/<process>-<random>    what a living operation uses
//! ```

use std::path::{Path, PathBuf};

use crate::blob::digest::Digest;
use crate::image::reference::Reference;

#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn format(&self) -> PathBuf {
        self.root.join("format")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(crate) fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn image(&self, digest: &Digest) -> PathBuf {
        self.images().join(format!("{}.json", digest.hex()))
    }

    pub(crate) fn names(&self) -> PathBuf {
        self.root.join("names")
    }

    /// A name is longer than a file's may be, and has slashes: its digest stands for it.
    pub(crate) fn name(&self, reference: &Reference) -> PathBuf {
        self.names().join(format!("{}.json", Digest::of(reference.to_string().as_bytes()).hex()))
    }

    pub(crate) fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    pub(crate) fn disk(&self, key: &Digest) -> PathBuf {
        self.disks().join(format!("{}.ext4", key.hex()))
    }

    pub(crate) fn disk_lock(&self, key: &Digest) -> PathBuf {
        self.disks().join(format!("{}.lock", key.hex()))
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    pub(crate) fn snapshot(&self, digest: &Digest) -> PathBuf {
        self.snapshots().join(digest.hex())
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    pub(crate) fn template(&self, template: &Digest) -> PathBuf {
        self.templates().join(format!("{}.json", template.hex()))
    }

    pub(crate) fn verifications(&self) -> PathBuf {
        self.root.join("verified")
    }

    pub(crate) fn verified(&self, snapshot: &Digest) -> PathBuf {
        self.verifications().join(format!("{}.json", snapshot.hex()))
    }

    pub(crate) fn drafts(&self) -> PathBuf {
        self.root.join("drafts")
    }

    pub(crate) fn arriving(&self) -> PathBuf {
        self.root.join("arriving")
    }

    pub(crate) fn used_times(&self) -> PathBuf {
        self.root.join("used")
    }

    pub(crate) fn used(&self, digest: &Digest) -> PathBuf {
        self.used_times().join(digest.hex())
    }

    pub(crate) fn pins(&self) -> PathBuf {
        self.root.join("pins")
    }

    pub(crate) fn pin(&self, key: &Digest, owner: &str) -> PathBuf {
        self.pins().join(format!("{owner}@{}", key.hex()))
    }

    pub(crate) fn leases(&self) -> PathBuf {
        self.root.join("leases")
    }

    pub(crate) fn directories(&self) -> [PathBuf; 13] {
        [
            self.blobs(),
            self.partial(),
            self.images(),
            self.names(),
            self.disks(),
            self.snapshots(),
            self.templates(),
            self.verifications(),
            self.drafts(),
            self.arriving(),
            self.used_times(),
            self.pins(),
            self.leases(),
        ]
    }
}
