//! The kernel's generator of random numbers: given what no other machine has, and reseeded with it at once.
//!
//! Until then all machines of one snapshot draw the same numbers, so nothing that this agent does before depends on one:
//! what must differ, such as the number of a greeting, comes from the host.

use std::fs::File;
use std::io;

#[derive(Debug, thiserror::Error)]
#[error("the kernel did not take the entropy")]
pub(super) struct Error(#[from] io::Error);

pub(super) fn repair(entropy: &[u8]) -> Result<(), Error> {
    Ok(imp_sys::entropy::credit(File::options().write(true).open("/dev/urandom")?, entropy)?)
}
