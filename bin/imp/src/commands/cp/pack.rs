//! Packs files of this machine for a VM, by the rule of copies out of one: what has content gets there, sockets and devices
//! are left out by name.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use imp_runtime::made_up;
use tar::{Builder, EntryType, Header};

use super::left_out::LeftOut;
use super::streams::Top;

/// Files with several names that are remembered; further ones are packed as files of their own.
const MOST_LINKED: usize = 1 << 18;

pub(super) struct Packer<W: Write> {
    archive: Builder<W>,
    left_out: LeftOut,
    /// First name of each file that has several, by device and inode.
    linked: HashMap<(u64, u64), PathBuf>,
}

impl<W: Write> Packer<W> {
    pub(super) fn new(output: W) -> Self {
        let mut archive = Builder::new(output);
        archive.follow_symlinks(false);
        Self { archive, left_out: LeftOut::default(), linked: HashMap::new() }
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
        if kind.is_fifo() {
            return self.without_content(name, metadata, EntryType::Fifo, None);
        }
        if kind.is_file() && metadata.nlink() > 1 {
            let room = self.linked.len() < MOST_LINKED;
            match self.linked.entry((metadata.dev(), metadata.ino())) {
                Entry::Occupied(first) => {
                    let first = first.get().clone();
                    return self.without_content(name, metadata, EntryType::Link, Some(&first));
                }
                Entry::Vacant(free) if room => drop(free.insert(name.to_owned())),
                Entry::Vacant(_) => {}
            }
        }
        if kind.is_file() && metadata.len() <= made_up::SMALL {
            return self.small_file(path, name, metadata);
        }
        self.archive.append_path_with_name(path, name).map_err(naming(path))
    }

    fn without_content(
        &mut self,
        name: &Path,
        metadata: &Metadata,
        kind: EntryType,
        link: Option<&Path>,
    ) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(metadata);
        header.set_entry_type(kind);
        header.set_size(0);
        match link {
            Some(target) => self.archive.append_link(&mut header, name, target),
            None => self.archive.append_data(&mut header, name, io::empty()),
        }
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
    fn pipes_and_further_names_of_a_file_are_in_the_archive_under_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("sub")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, path("sub/pipe"), rustix::fs::Mode::RUSR).unwrap();
        for (one, other, size) in [("a", "sub/b", 10), ("c", "sub/d", made_up::SMALL + 1)] {
            fs::write(path(one), vec![b'x'; size as usize]).unwrap();
            fs::hard_link(path(one), path(other)).unwrap();
        }
        let mut bytes = Vec::new();
        let mut packer = Packer::new(&mut bytes);
        packer.directory(folder.path(), Top::AsItIs).unwrap();
        packer.finish().unwrap();
        let mut kinds = Vec::new();
        for entry in tar::Archive::new(&bytes[..]).entries().unwrap() {
            let entry = entry.unwrap();
            kinds.push((entry.path().unwrap().display().to_string(), entry.header().entry_type()));
        }
        let of = |wanted: EntryType| kinds.iter().filter(|(_, kind)| *kind == wanted).count();
        assert!(kinds.contains(&("sub/pipe".into(), EntryType::Fifo)), "{kinds:?}");
        assert_eq!((of(EntryType::Regular), of(EntryType::Link)), (2, 2), "{kinds:?}");
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
