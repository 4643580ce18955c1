//! Small files of the host on their way into an archive. What the kernel makes up, as below /proc and /sys, is longer or
//! shorter than it says: a small file is therefore read before its size is written.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// A file that says it has no more bytes is small.
pub const SMALL: u64 = 256 << 10;
/// As much of such a file as a VM's agent passes on, too.
const MOST: u64 = 16 << 20;

/// What it has become meanwhile is neither followed elsewhere nor waited for.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// All that there is, as long as that is not much.
pub fn content(file: File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(MOST + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(content)
}
