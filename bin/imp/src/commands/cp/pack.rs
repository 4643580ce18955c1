//! Packs files of this machine for a VM, by the rule of copies out of one: what has content gets there, sockets and devices
//! are left out by name.

use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use imp_runtime::made_up;
use tar::{Builder, Header};

use super::left_out::LeftOut;
use super::streams::Top;

pub(super) struct Packer<W: Write> {
    archive: Builder<W>,
    left_out: LeftOut,
}

impl<W: Write> Packer<W> {
    pub(super) fn new(output: W) -> Self {
        let mut archive = Builder::new(output);
        archive.follow_symlinks(false);
        Self { archive, left_out: LeftOut::default() }
    }

    /// What is below `source`, and the directory itself if its copy is to be like it.
    pub(super) fn directory(&mut self, source: &Path, top: Top) -> io::Result<()> {
        let mut directories = vec![PathBuf::new()];
        while let Some(below) = directories.pop() {
            let path = source.join(&below);
            match (below.as_os_str().is_empty(), top) {
                (true, Top::AsItIs) => {}
                (true, Top::AsSource) => self.archive.append_dir(".", &path).map_err(naming(&path))?,
                (false, Top::AsItIs | Top::AsSource) => {
                    self.archive.append_dir(&below, &path).map_err(naming(&path))?;
                }
            }
            for entry in fs::read_dir(&path).map_err(naming(&path))? {
                let entry = entry.map_err(naming(&path))?;
                let below = below.join(entry.file_name());
                match entry.metadata() {
                    Ok(metadata) if metadata.is_dir() => directories.push(below),
                    Ok(metadata) => self.file(&entry.path(), &below, &metadata)?,
                    // One that was removed meanwhile was never there.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(naming(&entry.path())(error)),
                }
            }
        }
        Ok(())
    }

    /// One file, link or directory under a name.
    pub(super) fn entry(&mut self, source: &Path, name: &Path) -> io::Result<()> {
        let metadata = fs::symlink_metadata(source).map_err(naming(source))?;
        self.file(source, name, &metadata)
    }

    /// Ends the archive; what it does not hold.
    pub(super) fn finish(self) -> io::Result<LeftOut> {
        self.archive.into_inner()?.flush()?;
        Ok(self.left_out)
    }

    fn file(&mut self, path: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
        let kind = metadata.file_type();
        if kind.is_socket() {
            self.left_out.add(name, "a socket");
            return Ok(());
        }
        if kind.is_char_device() || kind.is_block_device() {
            self.left_out.add(name, "a device");
            return Ok(());
        }
        if kind.is_file() && metadata.len() <= made_up::SMALL {
            return self.small_file(path, name, metadata);
        }
        self.archive.append_path_with_name(path, name).map_err(naming(path))
    }

    fn small_file(&mut self, path: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
        let content = made_up::open(path).and_then(made_up::content).map_err(naming(path))?;
        let mut header = Header::new_gnu();
        header.set_metadata(metadata);
        header.set_size(content.len() as u64);
        self.archive.append_data(&mut header, name, content.as_slice())
    }
}

/// The path is part of what a user must know of an error below a directory that he named. What the guest said when it broke
/// the stream is not lost in it.
fn naming(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn names_and_content(bytes: &[u8]) -> Vec<(String, String)> {
        let mut archive = tar::Archive::new(bytes);
        let mut found: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut content = String::new();
                entry.read_to_string(&mut content).unwrap();
                (entry.path().unwrap().display().to_string(), content)
            })
            .collect();
        found.sort();
        found
    }

    #[test]
    fn sockets_and_devices_are_left_out_and_the_rest_is_there() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/file"), "content").unwrap();
        let _socket = UnixListener::bind(folder.path().join("sub/socket")).unwrap();
        let mut bytes = Vec::new();
        let mut packer = Packer::new(&mut bytes);
        packer.directory(folder.path(), Top::AsItIs).unwrap();
        packer.entry(Path::new("/dev/null"), Path::new("null")).unwrap();
        let mut left_out = LeftOut::default();
        left_out.add(Path::new("sub/socket"), "a socket");
        left_out.add(Path::new("null"), "a device");
        assert_eq!(packer.finish().unwrap(), left_out);
        let names = names_and_content(&bytes);
        assert_eq!(names, [("sub".into(), String::new()), ("sub/file".into(), "content".into())]);
    }

    #[test]
    fn what_the_kernel_makes_up_is_packed_with_its_content() {
        let version = fs::read_to_string("/proc/version").unwrap();
        let mut bytes = Vec::new();
        let mut packer = Packer::new(&mut bytes);
        packer.entry(Path::new("/proc/version"), Path::new("version")).unwrap();
        packer.finish().unwrap();
        assert_eq!(names_and_content(&bytes), [("version".to_owned(), version)]);
    }
}
