//! Files and directories into a node and out of it, as tar streams.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::NodeVm;
use super::error::Error;
use super::program::Command;

impl NodeVm {
    /// Copies a file or a directory of the host to the path `to` of the node; directories above it are made.
    pub fn push(&self, from: &Path, to: &Path) -> Result<(), Error> {
        let packed =
            pack(from, relative(to)).map_err(|source| Error::Pack { path: from.to_owned(), source })?;
        self.unpack(packed)
    }

    /// Makes a file of the node.
    pub fn write(&self, to: &Path, mode: u32, content: &[u8]) -> Result<(), Error> {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        let mut archive = tar::Builder::new(Vec::new());
        let packed =
            archive.append_data(&mut header, relative(to), content).and_then(|()| archive.into_inner());
        self.unpack(packed.map_err(|source| Error::Pack { path: to.to_owned(), source })?)
    }

    fn unpack(&self, packed: Vec<u8>) -> Result<(), Error> {
        self.check(Command::new("tar").arguments(["-x", "-C", "/", "--no-same-owner"]).input(packed))
            .map(drop)
    }

    /// Copies a file or a directory of the node to the path `to` of the host, where nothing may be.
    pub fn pull(&self, from: &Path, to: &Path) -> Result<(), Error> {
        let failed = |source| Error::Pack { path: from.to_owned(), source };
        let (Some(folder), Some(name)) = (from.parent(), from.file_name().and_then(|name| name.to_str()))
        else {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        };
        let tar = Command::new("tar").arguments(["-c", "-C", &folder.display().to_string(), "--", name]);
        let packed = self.check(tar)?.stdout;
        let beside = to.parent().unwrap_or(Path::new("."));
        let unpacked = tempfile::tempdir_in(beside).map_err(failed)?;
        tar::Archive::new(packed.as_slice()).unpack(unpacked.path()).map_err(failed)?;
        fs::rename(unpacked.path().join(name), to).map_err(failed)
    }
}

/// Archives hold no absolute paths.
fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn pack(from: &Path, name: &Path) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    archive.follow_symlinks(false);
    if fs::metadata(from)?.is_dir() {
        archive.append_dir_all(name, from)?;
    } else {
        archive.append_file(name, &mut File::open(from)?)?;
    }
    archive.into_inner()
}
