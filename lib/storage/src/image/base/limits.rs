//! How much an image may ask for before it is refused.

/// Bounds on what is built from layers; all of it is hostile until it is inside them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Uncompressed bytes of all layers together: the bound on decompression bombs.
    pub uncompressed_bytes: u64,
    /// Bytes of the finished disk that are not holes.
    pub disk_bytes: u64,
    /// Entries of all layers together.
    pub entries: u64,
    /// Bytes of memory for names, attributes and extents of the merged tree.
    pub metadata_bytes: u64,
    /// Bytes of one path, which may be longer than what a single system call takes.
    pub path_bytes: usize,
    /// Bytes of all extended header records of one entry.
    pub header_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            uncompressed_bytes: 64 << 30,
            disk_bytes: 64 << 30,
            entries: 4_000_000,
            metadata_bytes: 1 << 30,
            path_bytes: 128 << 10,
            header_bytes: 1 << 20,
        }
    }
}
