//! Whether there is room for a snapshot, asked before anything is written.

use std::path::Path;

use super::error::Error;

/// Refuses what does not fit now.
pub(super) fn check(directory: &Path, needed: u64) -> Result<(), Error> {
    let status = rustix::fs::statvfs(directory)
        .map_err(|error| Error::Read { path: directory.to_owned(), source: error.into() })?;
    let available = status.f_bavail.saturating_mul(status.f_frsize);
    if needed > available {
        return Err(Error::NoRoom { path: directory.to_owned(), needed, available });
    }
    Ok(())
}
