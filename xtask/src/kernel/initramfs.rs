//! Part of an initramfs: a `newc` cpio archive, which the kernel unpacks after the parts before it
//! (Documentation/driver-api/early-userspace/buffer-format.rst). No times, so that the same content is the same bytes.

use std::io::{self, Write as _};

use cpio::newc;

#[derive(Default)]
pub(super) struct Part {
    bytes: Vec<u8>,
    entries: u32,
}

impl Part {
    pub(super) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, 0o040_755, &[])
    }

    pub(super) fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.entry(path, 0o100_644, content)
    }

    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        let mut bytes = newc::trailer(self.bytes)?;
        // Where one part ends and the next begins must be a multiple of four.
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        Ok(bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        self.entries += 1;
        let entry = newc::Builder::new(path).ino(self.entries).mode(mode).nlink(1);
        let mut entry = entry.write(std::mem::take(&mut self.bytes), size);
        entry.write_all(content)?;
        self.bytes = entry.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn other_readers_find_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut part = Part::default();
        part.directory("modules").unwrap();
        part.file("modules/a.ko", b"12345").unwrap();
        part.file("list", b"/modules/a.ko\n").unwrap();
        let bytes = part.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        let mut busybox = Command::new("busybox")
            .args(["cpio", "-i", "-d"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("busybox is missing: apt-get install busybox-static");
        busybox.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(busybox.wait().unwrap().success());
        assert_eq!(std::fs::read(folder.path().join("modules/a.ko")).unwrap(), b"12345");
        assert_eq!(std::fs::read(folder.path().join("list")).unwrap(), b"/modules/a.ko\n");
    }
}
