//! Writes the archive format of an initramfs: newc, as Linux's Documentation/driver-api/early-userspace/buffer-format.rst
//! has it.

use std::io::{self, Read, Write};

/// Where an entry of the archive stands and what it is; contents follow separately.
pub(crate) struct Archive<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    pub(crate) fn directory(&mut self, name: &str) -> io::Result<()> {
        self.header(name, 0o040_755, 0, (0, 0))
    }

    pub(crate) fn character_device(&mut self, name: &str, mode: u32, device: (u32, u32)) -> io::Result<()> {
        self.header(name, 0o020_000 | mode, 0, device)
    }

    /// A regular file of exactly `size` bytes.
    pub(crate) fn file(&mut self, name: &str, mode: u32, size: u32, content: impl Read) -> io::Result<()> {
        self.header(name, 0o100_000 | mode, size, (0, 0))?;
        let copied = io::copy(&mut content.take(u64::from(size)), &mut self.out)?;
        if copied != u64::from(size) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        self.pad(size as usize)
    }

    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.header("TRAILER!!!", 0, 0, (0, 0))?;
        Ok(self.out)
    }

    fn header(&mut self, name: &str, mode: u32, size: u32, (major, minor): (u32, u32)) -> io::Result<()> {
        self.inode += 1;
        let name_size = name.len() + 1;
        let links = 1;
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size as u32, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + name_size)
    }

    /// Fills up to a multiple of four.
    fn pad(&mut self, written: usize) -> io::Result<()> {
        let zeros = [0; 3];
        self.out.write_all(zeros.get(..written.wrapping_neg() % 4).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn another_program_reads_what_was_written() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("dev").unwrap();
        archive.file("dev/init", 0o755, 5, &b"hello"[..]).unwrap();
        let bytes = archive.finish().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-i"])
            .current_dir(&directory)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("apt-get install busybox-static");
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(std::fs::read(directory.path().join("dev/init")).unwrap(), b"hello");
    }

    #[test]
    fn a_file_that_shrank_while_it_was_read_is_an_error() {
        let mut archive = Archive::new(Vec::new());
        assert!(archive.file("init", 0o755, 6, &b"hello"[..]).is_err());
    }
}
