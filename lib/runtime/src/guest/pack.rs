//! Writes a directory of the host as a tar stream. What changes meanwhile may be old or new in it, but the archive stays
//! one.

use std::fs::{self, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};

use crate::made_up;

/// Packs what is below `source`, with owners, modes and times; links are packed as links. Sockets are left out: without
/// the process behind them they are nothing.
pub(super) fn pack<W: Write>(source: &Path, out: W) -> io::Result<W> {
    let mut archive = Builder::new(out);
    let mut directories = vec![PathBuf::new()];
    while let Some(below) = directories.pop() {
        let path = source.join(&below);
        let meta = fs::metadata(&path).map_err(naming(&path))?;
        let name = if below.as_os_str().is_empty() { Path::new(".") } else { below.as_path() };
        archive.append_data(&mut header(EntryType::Directory, &meta, 0), name, io::empty())?;
        for entry in fs::read_dir(&path).map_err(naming(&path))? {
            let entry = entry.map_err(naming(&path))?;
            let below = below.join(entry.file_name());
            // One that was removed meanwhile was never there.
            let Some(meta) = unless_gone(entry.metadata()).map_err(naming(&entry.path()))? else { continue };
            if meta.is_dir() {
                directories.push(below);
            } else {
                append(&mut archive, &entry.path(), &below, &meta)?;
            }
        }
    }
    archive.into_inner()
}

/// Packs one file under this name; a link is followed, as the user who named it meant.
pub(super) fn pack_file<W: Write>(source: &Path, name: &Path, out: W) -> io::Result<W> {
    let mut archive = Builder::new(out);
    let meta = fs::metadata(source).map_err(naming(source))?;
    append(&mut archive, source, name, &meta)?;
    archive.into_inner()
}

fn append<W: Write>(archive: &mut Builder<W>, path: &Path, name: &Path, meta: &Metadata) -> io::Result<()> {
    let kind = meta.file_type();
    if kind.is_symlink() {
        let Some(target) = unless_gone(fs::read_link(path)).map_err(naming(path))? else { return Ok(()) };
        return archive.append_link(&mut header(EntryType::Symlink, meta, 0), name, target);
    }
    if kind.is_file() {
        let Some(file) = unless_gone(made_up::open(path)).map_err(naming(path))? else { return Ok(()) };
        let size = meta.len();
        if size <= made_up::SMALL {
            let content = made_up::content(file).map_err(naming(path))?;
            let mut header = header(EntryType::Regular, meta, content.len() as u64);
            return archive.append_data(&mut header, name, content.as_slice());
        }
        // As many bytes as the header says, whether the file grows or shrinks.
        let content = file.take(size).chain(io::repeat(0)).take(size);
        return archive.append_data(&mut header(EntryType::Regular, meta, size), name, content);
    }
    if kind.is_socket() {
        tracing::warn!(path = %path.display(), "a socket is not copied into a guest");
        return Ok(());
    }
    let special = match (kind.is_fifo(), kind.is_char_device()) {
        (true, _) => EntryType::Fifo,
        (false, true) => EntryType::Char,
        (false, false) => EntryType::Block,
    };
    let mut header = header(special, meta, 0);
    if special != EntryType::Fifo {
        header.set_device_major(rustix::fs::major(meta.rdev()))?;
        header.set_device_minor(rustix::fs::minor(meta.rdev()))?;
    }
    archive.append_data(&mut header, name, io::empty())
}

fn header(kind: EntryType, meta: &Metadata, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(meta.mode() & 0o7777);
    header.set_uid(meta.uid().into());
    header.set_gid(meta.gid().into());
    // One before 1970 has the same bits in the binary form that the field takes then.
    header.set_mtime(meta.mtime().cast_unsigned());
    header.set_size(size);
    header
}

fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// The path is part of what a user must know of an error below a directory that he named.
fn naming(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_tree_is_packed_with_its_links_and_without_its_sockets() {
        let directory = tempfile::tempdir().unwrap();
        let below = |name: &str| directory.path().join(name);
        let deep = format!("{}/{}", "d".repeat(120), "e".repeat(120));
        fs::create_dir_all(below(&deep)).unwrap();
        fs::write(below(&deep).join("file"), "content").unwrap();
        fs::set_permissions(below(&deep).join("file"), fs::Permissions::from_mode(0o4751)).unwrap();
        symlink("/nowhere/else", below("link")).unwrap();
        let _listener = UnixListener::bind(below("socket")).unwrap();
        let bytes = pack(directory.path(), Vec::new()).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found: Vec<(String, u32, String)> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut content = String::new();
                entry.read_to_string(&mut content).unwrap();
                let link = entry.link_name().unwrap().map(|link| link.display().to_string());
                let name = entry.path().unwrap().display().to_string();
                (name, entry.header().mode().unwrap(), link.unwrap_or(content))
            })
            .collect();
        found.sort();
        let found: Vec<(&str, &str)> = found.iter().map(|(n, _, c)| (n.as_str(), c.as_str())).collect();
        let file = format!("{deep}/file");
        assert!(
            found.contains(&(&file, "content")) && found.contains(&("link", "/nowhere/else")),
            "{found:?}"
        );
        assert!(!found.iter().any(|(name, _)| *name == "socket"), "{found:?}");
    }

    #[test]
    fn a_file_that_shrinks_or_grows_while_it_is_packed_breaks_nothing_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        for (length, now) in
            [(10, 4), (10, 16), (made_up::SMALL + 10, 4), (made_up::SMALL + 10, made_up::SMALL + 16)]
        {
            fs::write(&path, vec![1; length as usize]).unwrap();
            let meta = fs::symlink_metadata(&path).unwrap();
            fs::write(&path, vec![2; now as usize]).unwrap();
            let mut archive = Builder::new(Vec::new());
            append(&mut archive, &path, Path::new("log"), &meta).unwrap();
            let mut end = header(EntryType::Regular, &meta, 3);
            archive.append_data(&mut end, "end", &b"end"[..]).unwrap();
            let bytes = archive.into_inner().unwrap();
            let names: Vec<_> = tar::Archive::new(bytes.as_slice())
                .entries()
                .unwrap()
                .map(|entry| entry.unwrap().path().unwrap().into_owned())
                .collect();
            assert_eq!(names, [Path::new("log"), Path::new("end")]);
        }
    }

    #[test]
    fn what_the_kernel_makes_up_is_packed_with_its_content() {
        let version = fs::read("/proc/version").unwrap();
        let bytes = pack_file(Path::new("/proc/version"), Path::new("version"), Vec::new()).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut content = Vec::new();
        archive.entries().unwrap().next().unwrap().unwrap().read_to_end(&mut content).unwrap();
        assert_eq!(content, version);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let error = pack(Path::new("/nonexistent/directory"), Vec::new()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/directory"), "{error}");
    }
}
