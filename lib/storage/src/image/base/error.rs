//! Why a base disk could not be made.

use std::io;
use std::path::PathBuf;

use crate::blob::digest::Digest;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "layer {layer}: media type {media_type:?} is not one of a layer (tar, tar+gzip or tar+zstd); rebuild the image"
    )]
    MediaType { layer: Digest, media_type: String },
    #[error("layer {layer}: its media type says {declared}, its content is {found}; rebuild the image")]
    Compression { layer: Digest, declared: &'static str, found: &'static str },
    #[error("layer {layer}: cannot read {path}")]
    Read {
        layer: Digest,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("layer {layer}: the compressed data is damaged or cut short; pull the image again")]
    Inflate {
        layer: Digest,
        #[source]
        source: io::Error,
    },
    #[error(
        "layer {layer}: the content has diff id {found}, the image's configuration says {expected}; rebuild the image"
    )]
    DiffId { layer: Digest, expected: Digest, found: Digest },
    #[error("layer {layer}: entry {entry:?} is refused")]
    Entry {
        layer: Digest,
        entry: String,
        #[source]
        reason: Refusal,
    },
    #[error("layer {layer} is refused")]
    Layer {
        layer: Digest,
        #[source]
        reason: Refusal,
    },
    #[error("the image is refused")]
    Image {
        #[source]
        reason: Refusal,
    },
    #[error("the disk that holds {path} is full; make room there (imp image prune) and try again")]
    DiskFull {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// What is wrong with an entry, a layer or an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the tar ends in the middle of an entry; pull the image again")]
    Truncated,
    #[error("the header's checksum is wrong: this is not a tar, or it is damaged")]
    Checksum,
    #[error("the header's field {0} is not a number in its range")]
    Number(&'static str),
    #[error("an extended header record is malformed")]
    Record,
    #[error("two extended headers say {0}")]
    Twice(String),
    #[error("a global header sets {0}, which only an entry may have")]
    Global(String),
    #[error("an extended header without an entry behind it")]
    NoEntry,
    #[error("the extended header says a size of {extended} bytes, the plain one {plain}")]
    Sizes { extended: u64, plain: u64 },
    #[error("the map of a sparse file is malformed or out of order")]
    SparseMap,
    #[error("entries of type {0:?} have no meaning in an image")]
    Type(char),
    #[error("the name is empty, or names no file")]
    Name,
    #[error("the name climbs above the root")]
    AboveRoot,
    #[error("a name of {0} bytes is longer than the 255 that Linux has room for")]
    NameTooLong(usize),
    #[error("the target of the symbolic link is empty, or longer than 4095 bytes")]
    SymlinkTarget,
    #[error("device numbers {major}:{minor} do not exist on Linux")]
    DeviceNumbers { major: u64, minor: u64 },
    #[error("the extended attributes do not fit in the 4 KiB that ext4 has for them")]
    Xattrs,
    #[error("an ACL is malformed")]
    Acl,
    #[error("its path leads through more than 40 symbolic links")]
    SymlinkLoop,
    #[error("its path leads through {0:?}, which the same layer made a file")]
    NotADirectory(String),
    #[error("the target {0:?} of the hard link does not exist in this layer or below")]
    NoTarget(String),
    #[error("the target {0:?} of the hard link is a directory")]
    LinkToDirectory(String),
    #[error("a file cannot have more than 65000 names")]
    TooManyNames,
    #[error("the root of the image must be a directory")]
    Root,
    #[error("a file of {0} bytes is larger than ext4 can hold")]
    FileTooLarge(u64),
    #[error("there are more than {0} entries")]
    Entries(u64),
    #[error("names and attributes need more than {0} bytes of memory")]
    Metadata(u64),
    #[error("the path has more than {0} bytes")]
    Path(usize),
    #[error("the extended headers have more than {0} bytes")]
    HeaderBytes(usize),
    #[error("the layers unpack to more than {0} bytes")]
    Uncompressed(u64),
    #[error("the disk would be larger than {0} bytes")]
    Disk(u64),
}
