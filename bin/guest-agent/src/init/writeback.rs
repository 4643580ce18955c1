//! How long written data may wait in memory before the disk sees it.
//!
//! The kernel's own ratios suit machines whose disks survive them. The private disk has no journal, and after a crash of
//! its VM nobody reads it: writing early only takes time from the processes, and a file that is soon replaced or removed
//! is written for nothing. The age after which data is written (30 s) stays.

use std::fs;

use crate::log;

/// Shares of the available memory, in percent: from the first on it is written in the background, at the second writers
/// wait. A snapshot or an orderly end writes everything.
const RATIOS: [(&str, &str); 2] =
    [("/proc/sys/vm/dirty_background_ratio", "50"), ("/proc/sys/vm/dirty_ratio", "70")];

/// A kernel that does not take them is slower, not wrong.
pub(super) fn relax() {
    for (file, percent) in RATIOS {
        if let Err(error) = fs::write(file, percent) {
            log::warn(format_args!("{file} not set: {error}"));
        }
    }
}
