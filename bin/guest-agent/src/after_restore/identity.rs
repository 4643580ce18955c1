//! Who the machine is: host name, machine id, boot id.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

use crate::configure::etc::{self, Names};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// A new one at each read.
const UUID: &str = "/proc/sys/kernel/random/uuid";
const MACHINE_ID: &str = "/etc/machine-id";
/// Where old systems have a copy; on newer ones it is a link.
const DBUS_MACHINE_ID: &str = "/var/lib/dbus/machine-id";
/// Where a file is made that is mounted over another one: in memory, and writable whatever the root is.
const MEMORY: &str = "/dev";

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the host name cannot be set")]
    Hostname(#[source] io::Error),
    #[error("{} cannot be replaced", path.display())]
    MachineId { path: PathBuf, source: io::Error },
    #[error("nothing can be mounted over {}", path.display())]
    Mount { path: PathBuf, source: io::Error },
    #[error("there is no new boot id")]
    BootId(#[source] io::Error),
    #[error("{} still says something else", path.display())]
    NotSeen { path: PathBuf },
}

#[derive(Debug, thiserror::Error)]
#[error("`machine_id` must be 32 hexadecimal digits, not all of them zero")]
pub(super) struct ParseError;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MachineId(String);

impl MachineId {
    pub(super) fn parse(text: &str) -> Result<Self, ParseError> {
        let good = text.len() == 32
            && text.bytes().all(|byte| byte.is_ascii_hexdigit())
            && text.bytes().any(|byte| byte != b'0');
        if good { Ok(Self(text.to_ascii_lowercase())) } else { Err(ParseError) }
    }

    fn line(&self) -> String {
        format!("{}\n", self.0)
    }
}

/// Needs the new entropy: the boot id is drawn here.
pub(super) fn repair(hostname: &str, names: &Names, machine_id: &MachineId) -> Result<(), Error> {
    rustix::system::sethostname(hostname.as_bytes()).map_err(|error| Error::Hostname(error.into()))?;
    etc::write(Path::new("/etc"), names);
    set_machine_id(Path::new(MACHINE_ID), machine_id)?;
    let copy = Path::new(DBUS_MACHINE_ID);
    if fs::symlink_metadata(copy).is_ok_and(|copy| copy.is_file()) {
        set_machine_id(copy, machine_id)?;
    }
    set_boot_id()
}

/// A file that cannot be written is mounted over. Where there is none and none can be made, nothing is shared.
fn set_machine_id(path: &Path, id: &MachineId) -> Result<(), Error> {
    let failed = |source| Error::MachineId { path: path.to_owned(), source };
    // A link leads to the file that counts; one that leads nowhere is replaced.
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let (Some(directory), Some(name)) = (real.parent(), real.file_name().and_then(|name| name.to_str()))
    else {
        return Err(failed(io::ErrorKind::InvalidFilename.into()));
    };
    match etc::write_file(directory, name, id.line().as_bytes()) {
        Ok(()) => {}
        Err(error) if !real.exists() && error.raw_os_error() == Some(Errno::ROFS.raw_os_error()) => {
            return Ok(());
        }
        Err(error) if !real.exists() => return Err(failed(error)),
        Err(_) => mount_over(&real, &id.line())?,
    }
    check(path, &id.line())
}

/// The kernel's own number stays for good; what is read in its place is another file.
fn set_boot_id() -> Result<(), Error> {
    let boot_id = fs::read_to_string(UUID).map_err(Error::BootId)?;
    mount_over(Path::new(BOOT_ID), &boot_id)?;
    check(Path::new(BOOT_ID), &boot_id)
}

/// The file lives as long as its mount, and has no other name.
fn mount_over(path: &Path, content: &str) -> Result<(), Error> {
    let temporary = Path::new(MEMORY).join(".imp-identity");
    let mounted = (|| {
        // That of an earlier wake: no other mount shows a file without a name.
        if fs::metadata(path)?.nlink() == 0 {
            unmount(path, UnmountFlags::DETACH)?;
        }
        let _ = fs::remove_file(&temporary);
        let mut file = File::options().write(true).create_new(true).mode(0o444).open(&temporary)?;
        file.write_all(content.as_bytes())?;
        mount_bind(&temporary, path)?;
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        Ok(mount_remount(path, MountFlags::BIND | flags, c"")?)
    })();
    let removed = fs::remove_file(&temporary);
    mounted.and(removed).map_err(|source| Error::Mount { path: path.to_owned(), source })
}

fn check(path: &Path, content: &str) -> Result<(), Error> {
    let seen = fs::read(path).is_ok_and(|seen| seen == content.as_bytes());
    if seen { Ok(()) } else { Err(Error::NotSeen { path: path.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_id_is_what_its_readers_expect() {
        assert_eq!(MachineId::parse(&"0A".repeat(16)).unwrap().line(), format!("{}\n", "0a".repeat(16)));
        for text in ["", &"0".repeat(32), &"1".repeat(31), &"g".repeat(32)] {
            assert!(MachineId::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_file_that_counts_is_replaced_wherever_a_link_leads() {
        let directory = tempfile::tempdir().unwrap();
        let id = MachineId::parse(&"12".repeat(16)).unwrap();
        let below = directory.path().join("var");
        fs::create_dir(&below).unwrap();
        fs::write(below.join("real"), "old\n").unwrap();
        for (link, target) in [("link", "var/real"), ("dangling", "var/none")] {
            let path = directory.path().join(link);
            std::os::unix::fs::symlink(target, &path).unwrap();
            set_machine_id(&path, &id).unwrap();
            assert_eq!(fs::read_to_string(path).unwrap(), id.line());
        }
        assert_eq!(fs::read_to_string(below.join("real")).unwrap(), id.line());
        // An image without /etc.
        let absent = directory.path().join("etc/machine-id");
        set_machine_id(&absent, &id).unwrap();
        assert_eq!(fs::read_to_string(absent).unwrap(), id.line());
    }

    #[test]
    fn what_is_read_back_decides() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(check(&path, "a").is_err());
        fs::write(&path, "b").unwrap();
        assert!(matches!(check(&path, "a"), Err(Error::NotSeen { .. })));
        check(&path, "b").unwrap();
    }
}
