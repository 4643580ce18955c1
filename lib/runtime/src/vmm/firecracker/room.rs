//! The directory that a Firecracker works in. Everything it opens is there, under relative names that are the same for
//! every VM: a snapshot holds these names, and a machine that is made of it finds its own files under them.

use std::fs::{self, File, FileType};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, fchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::jail;
use crate::layout::VmLayout;
use crate::vmm::{Access, BootConfig, Drive, Error, Origin};

pub(super) const API: &str = "api.sock";
pub(super) const VSOCK: &str = "v.sock";
pub(super) const KERNEL: &str = "kernel";
pub(super) const INITRAMFS: &str = "initramfs";
/// Of the snapshot that a machine is made of.
pub(super) const STATE: &str = "state";
pub(super) const MEMORY: &str = "memory";
/// Of a snapshot that is being made.
pub(super) const NEW_STATE: &str = "state.new";
pub(super) const NEW_MEMORY: &str = "memory.new";
/// Pages that have changed since the machine was loaded, as of its last snapshot of changes.
pub(super) const CHANGES: &str = "memory.changes";
pub(super) const LOG: &str = "log";
pub(super) const METRICS: &str = "metrics";
/// Firecracker's standard output, which is the guest's serial console.
const CONSOLE: &str = "console";
/// What is written into and read from as it comes.
pub(super) const STREAMS: [&str; 3] = [CONSOLE, LOG, METRICS];

#[derive(Debug, Clone)]
pub(super) struct Room {
    directory: PathBuf,
    /// Whose it is, if it is a jail.
    user: Option<u32>,
}

/// Name of a drive's file.
pub(super) fn drive(drive: &Drive) -> String {
    format!("{}.img", drive.id)
}

impl Room {
    /// The VM's own runtime directory.
    pub(super) fn open(vm: &VmLayout) -> Self {
        Self { directory: vm.runtime().to_owned(), user: None }
    }

    /// A jail that is made here and belongs to this user.
    pub(super) fn jail(directory: PathBuf, user: u32) -> Self {
        Self { directory, user: Some(user) }
    }

    /// That of a process which has started.
    pub(super) fn of_running(vm: &VmLayout) -> Result<Self, Error> {
        let Some(directory) = jail::found(vm) else { return Ok(Self::open(vm)) };
        let owner = fs::metadata(&directory).map(|meta| meta.uid());
        let user = owner.map_err(|source| Error::Open { path: directory.clone(), source })?;
        Ok(Self { directory, user: Some(user) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.directory
    }

    pub(super) fn user(&self) -> Option<u32> {
        self.user
    }

    pub(super) fn api(&self) -> PathBuf {
        self.directory.join(API)
    }

    pub(super) fn vsock(&self) -> PathBuf {
        self.directory.join(VSOCK)
    }

    /// Where Firecracker connects to when the guest connects to this port of its host.
    pub(super) fn knock(&self, port: u32) -> PathBuf {
        self.directory.join(format!("{VSOCK}_{port}"))
    }

    /// Makes what is to be there before Firecracker starts. A process that was killed leaves its sockets, and Firecracker
    /// refuses to start over them.
    pub(super) fn furnish(&self, boot: &BootConfig) -> Result<(), Error> {
        if let Some(user) = self.user {
            let made = fs::create_dir_all(&self.directory);
            made.map_err(|source| Error::Make { path: self.directory.clone(), source })?;
            // The jailer does so, too, when it starts.
            jail::give(&self.directory, user).map_err(Error::Jail)?;
        }
        for socket in [API, VSOCK] {
            self.clear(socket)?;
        }
        for name in STREAMS {
            self.clear(name)?;
            let path = self.directory.join(name);
            let made = rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR);
            made.map_err(|error| Error::Make { path: path.clone(), source: error.into() })?;
            if let Some(user) = self.user {
                jail::give(&path, user).map_err(Error::Jail)?;
            }
        }
        let brought = match &boot.origin {
            Origin::Boot(image) => [(KERNEL, &image.kernel), (INITRAMFS, &image.initramfs)],
            Origin::Snapshot(files) => [(STATE, &files.state), (MEMORY, &files.memory)],
        };
        for (name, file) in brought {
            self.bring(name, file, Access::ReadOnly)?;
        }
        boot.drives.iter().try_for_each(|file| self.bring(&drive(file), &file.path, file.access))
    }

    fn bring(&self, name: &str, target: &Path, access: Access) -> Result<(), Error> {
        self.clear(name)?;
        let path = self.directory.join(name);
        let target =
            fs::canonicalize(target).map_err(|source| Error::Open { path: target.to_owned(), source })?;
        match (self.user, access) {
            (None, _) => symlink(target, &path).map_err(|source| Error::Make { path, source }),
            (Some(_), Access::ReadOnly) => jail::bring(&target, &path, None).map_err(Error::Jail),
            (Some(user), Access::Private) => jail::bring(&target, &path, Some(user)).map_err(Error::Jail),
        }
    }

    /// Puts what Firecracker has made where it is wanted.
    pub(super) fn take_out(&self, name: &str, to: &Path) -> Result<(), Error> {
        let from = self.directory.join(name);
        let made = self.made(name)?;
        let make = |source| Error::Make { path: to.to_owned(), source };
        match fs::rename(&from, to) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                return clone_file(&made, to).and_then(|()| fs::remove_file(&from)).map_err(make);
            }
            Err(error) => return Err(make(error)),
        }
        is_at(&made, to)?;
        // The machine's user has no more to do with it.
        match self.user {
            Some(_) => fchown(&made, Some(rustix::process::geteuid().as_raw()), None).map_err(make),
            None => Ok(()),
        }
    }

    /// Shows what Firecracker has made, and goes on using, at another place.
    pub(super) fn lend(&self, name: &str, to: &Path) -> Result<(), Error> {
        let made = self.made(name)?;
        match fs::hard_link(self.directory.join(name), to) {
            Ok(()) => is_at(&made, to),
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                clone_file(&made, to).map_err(|source| Error::Make { path: to.to_owned(), source })
            }
            Err(source) => Err(Error::Make { path: to.to_owned(), source }),
        }
    }

    /// A file that Firecracker has written.
    fn made(&self, name: &str) -> Result<File, Error> {
        self.open_as(name, OFlags::RDONLY, FileType::is_file).map(File::from)
    }

    fn clear(&self, name: &str) -> Result<(), Error> {
        let path = self.directory.join(name);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::Make { path, source }),
            _ => Ok(()),
        }
    }

    /// Both ends of the console in one: its writer never finds it closed, and finds it full rather than wait for a reader.
    pub(super) fn console_for_writing(&self) -> Result<OwnedFd, Error> {
        self.stream(CONSOLE, OFlags::RDWR)
    }

    /// The end of a stream to be read from; it ends when the process has ended.
    pub(super) fn read(&self, name: &str) -> Result<tokio::net::unix::pipe::Receiver, Error> {
        let opened = self.stream(name, OFlags::RDONLY)?;
        tokio::net::unix::pipe::Receiver::from_owned_fd(opened)
            .map_err(|source| Error::Open { path: self.directory.join(name), source })
    }

    pub(super) fn console(&self) -> Result<tokio::net::unix::pipe::Receiver, Error> {
        self.read(CONSOLE)
    }

    fn stream(&self, name: &str, access: OFlags) -> Result<OwnedFd, Error> {
        self.open_as(name, access, FileTypeExt::is_fifo)
    }

    /// Whatever stands there now: a process that was taken over by its guest may have put something else in the place.
    fn open_as(&self, name: &str, access: OFlags, kind: fn(&FileType) -> bool) -> Result<OwnedFd, Error> {
        let path = self.directory.join(name);
        let flags = access | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(io::Error::from).and_then(|opened| {
                let file = File::from(opened);
                if kind(&file.metadata()?.file_type()) {
                    Ok(OwnedFd::from(file))
                } else {
                    Err(io::Error::from(io::ErrorKind::InvalidInput))
                }
            });
        opened.map_err(|source| Error::Open { path, source })
    }
}

/// With its holes.
fn clone_file(file: &File, to: &Path) -> io::Result<()> {
    let file = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    imp_storage::disk::clone_scratch(&file, to).map(drop).map_err(io::Error::other)
}

/// What was looked at is what was moved.
fn is_at(file: &File, path: &Path) -> Result<(), Error> {
    let found = fs::symlink_metadata(path).and_then(|there| Ok((there, file.metadata()?)));
    match found {
        Ok((there, file)) if (there.dev(), there.ino()) == (file.dev(), file.ino()) => Ok(()),
        Ok(_) => {
            // Whoever reads the place later must not read this.
            let _ = fs::remove_file(path);
            Err(Error::Open { path: path.to_owned(), source: io::ErrorKind::InvalidData.into() })
        }
        Err(source) => Err(Error::Open { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_firecracker_has_made_is_taken_out_and_what_only_has_its_name_is_not() {
        let place = tempfile::tempdir().unwrap();
        let room = Room { directory: place.path().join("room"), user: None };
        fs::create_dir(&room.directory).unwrap();
        let path = |name: &str| place.path().join(name);
        fs::write(room.directory.join(NEW_STATE), "state").unwrap();
        room.lend(NEW_STATE, &path("lent")).unwrap();
        room.take_out(NEW_STATE, &path("state")).unwrap();
        for name in ["lent", "state"] {
            assert_eq!(fs::read_to_string(path(name)).unwrap(), "state");
        }

        fs::write(path("secret"), "of the host").unwrap();
        symlink(path("secret"), room.directory.join(NEW_STATE)).unwrap();
        fs::create_dir(room.directory.join(NEW_MEMORY)).unwrap();
        for name in [NEW_STATE, NEW_MEMORY] {
            room.lend(name, &path("other")).unwrap_err();
            room.take_out(name, &path("other")).unwrap_err();
            assert!(fs::symlink_metadata(path("other")).is_err());
        }
    }

    #[test]
    fn a_file_that_was_exchanged_meanwhile_does_not_stay() {
        let place = tempfile::tempdir().unwrap();
        let (one, other) = (place.path().join("one"), place.path().join("other"));
        fs::write(&one, "").unwrap();
        fs::write(&other, "").unwrap();
        let file = File::open(&one).unwrap();
        is_at(&file, &one).unwrap();
        is_at(&file, &other).unwrap_err();
        assert!(!other.exists());
    }
}
