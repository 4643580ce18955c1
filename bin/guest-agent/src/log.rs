//! Messages for the guest's kernel log, which reaches the console.
//!
//! Nothing here can fail or block: the kernel limits the rate, and an agent without a log goes on. Standard output and
//! error are never used.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;

/// Longest message the kernel takes in one record.
const LONGEST: usize = 900;

/// Set once, at the start of the program; the agent in a test has no business in its host's log.
static KERNEL_LOG: OnceLock<Option<File>> = OnceLock::new();

/// Opens the kernel's log. Before that, and without one, messages go nowhere.
pub fn open() {
    KERNEL_LOG.get_or_init(|| File::options().write(true).open("/dev/kmsg").ok());
}

/// Something a person must look at.
pub fn error(message: fmt::Arguments<'_>) {
    write(3, message);
}

/// Something odd that was survived.
pub fn warn(message: fmt::Arguments<'_>) {
    write(4, message);
}

/// A change of state.
pub fn info(message: fmt::Arguments<'_>) {
    write(6, message);
}

/// A step on the way, for who looks for time or trouble.
pub fn debug(message: fmt::Arguments<'_>) {
    write(7, message);
}

fn write(level: u8, message: fmt::Arguments<'_>) {
    let Some(mut kernel_log) = KERNEL_LOG.get().and_then(Option::as_ref) else { return };
    let mut line = format!("<{level}>imp: ");
    if line.write_fmt(message).is_ok() {
        let end = (0..=LONGEST.min(line.len())).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
        let line = line.get(..end).unwrap_or_default().replace('\n', " ");
        let _ = kernel_log.write_all(line.as_bytes());
    }
}
