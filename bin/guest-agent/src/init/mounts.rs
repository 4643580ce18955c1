//! The file systems of the kernel: in the initramfs, where drivers are loaded, and in the root, where processes run.

use std::ffi::CStr;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use super::Error;
use crate::log;

struct FileSystem {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    options: &'static CStr,
}

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

const PROC: FileSystem = FileSystem { kind: "proc", target: "/proc", flags: SAFE, options: c"" };
const SYS: FileSystem = FileSystem { kind: "sysfs", target: "/sys", flags: SAFE, options: c"" };
const DEV: FileSystem =
    FileSystem { kind: "devtmpfs", target: "/dev", flags: MountFlags::NOSUID, options: c"mode=0755" };

/// What containers and inits both expect. /run and /tmp are the image's own directories: an image that needs /run empty
/// at boot has an init that mounts it.
const BELOW: [FileSystem; 4] = [
    FileSystem {
        kind: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        options: c"mode=0620,gid=5,ptmxmode=0666",
    },
    FileSystem {
        kind: "tmpfs",
        target: "/dev/shm",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: c"mode=1777",
    },
    FileSystem { kind: "mqueue", target: "/dev/mqueue", flags: SAFE, options: c"" },
    FileSystem {
        kind: "cgroup2",
        target: "/sys/fs/cgroup",
        flags: SAFE,
        // Without favordynmods each process that joins a cgroup waits for every processor to have taken note: several
        // ticks of the clock.
        options: c"nsdelegate,memory_recursiveprot,favordynmods",
    },
];

const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// In the initramfs.
pub(super) fn first() -> Result<(), Error> {
    for file_system in [PROC, SYS, DEV] {
        file_system
            .mount("")
            .map_err(|source| Error::Mount { what: file_system.target.to_owned(), source })?;
    }
    Ok(())
}

/// Moves what `first` has mounted below the new root.
pub(super) fn move_to(root: &str) -> Result<(), Error> {
    for file_system in [PROC, SYS, DEV] {
        let target = format!("{root}{}", file_system.target);
        make_directory(Path::new(&target))
            .and_then(|()| Ok(rustix::mount::mount_move(file_system.target, target.as_str())?))
            .map_err(|source| Error::Mount { what: target.clone(), source })?;
    }
    Ok(())
}

/// In the root. A kernel without one of these still runs processes.
pub(super) fn rest() {
    for file_system in BELOW {
        if let Err(error) = file_system.mount("") {
            log::warn(format_args!("{} not mounted: {error}", file_system.target));
        }
    }
    make_tun();
    for (target, link) in LINKS {
        let _ = symlink(target, link);
    }
}

/// Who opens it makes the kernel ask for its driver.
fn make_tun() {
    let path = "/dev/net/tun";
    let made = make_directory(Path::new("/dev/net")).and_then(|()| {
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from_raw_mode(0o666));
        Ok(rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, rustix::fs::makedev(10, 200))?)
    });
    if let Err(error) = made {
        log::warn(format_args!("{path} not made: {error}"));
    }
}

impl FileSystem {
    fn mount(&self, root: &str) -> std::io::Result<()> {
        let target = format!("{root}{}", self.target);
        make_directory(Path::new(&target))?;
        let with = |options: &CStr| mount(self.kind, target.as_str(), self.kind, self.flags, options);
        match with(self.options) {
            // A kernel that is too old for one of the options.
            Err(Errno::INVAL) => Ok(with(c"")?),
            mounted => Ok(mounted?),
        }
    }
}

/// Makes a mount point. What an image has put there instead of a directory gives way: a mount point must not be a link.
pub(super) fn make_directory(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(path)?,
        Err(_) => {}
    }
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}
