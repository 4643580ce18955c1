//! Reads the tar of a layer: v7, ustar, GNU and PAX, sparse files of every kind, and nothing that two readers could
//! understand in two ways.
//!
//! Formats: POSIX.1-2017 `pax`, and the chapters "Basic Tar Format" and "Sparse Formats" of the GNU tar manual.

mod header;
mod pax;
mod reader;
mod sparse;

pub(super) use reader::{Error, Kind, Member, Reader};
pub(super) use sparse::Segment;

/// Bytes of a header and the unit of everything.
const RECORD: usize = 512;
