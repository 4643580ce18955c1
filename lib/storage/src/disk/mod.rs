//! The disks of a VM: the base that all VMs of an image share, and the private scratch disk of one.
//!
//! A scratch disk has no journal. It belongs to one VM and goes with it: after a crash of the guest nobody mounts it again,
//! and a snapshot keeps it together with the memory that knows what is in flight. A journal would cost its size in every
//! copy and a second write of all metadata.

pub(crate) mod partial;
mod place;
mod scratch;

use std::io;
use std::path::PathBuf;

pub use partial::remove_leftovers;
pub use place::{Placement, clone_scratch, place_immutable};
pub use scratch::{SMALLEST_SCRATCH, create_scratch};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the disk that holds {path} is full; make room there (imp prune) and try again")]
    DiskFull {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot create the disk {path}")]
    Create {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot copy the disk {from} to {to}")]
    Copy {
        from: PathBuf,
        to: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("a scratch disk cannot have {bytes} bytes: it takes {smallest} to {largest}")]
    Size { bytes: u64, smallest: u64, largest: u64 },
}

/// Whether an error says that there is no room: of the disk, of a quota, or of the process's file size limit.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
