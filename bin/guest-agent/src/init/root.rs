//! The machine's root: an overlay of the image's read-only disk and the VM's private one, with the agent at /.imp.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount, mount_bind, mount_move, mount_remount};

use super::{Error, modules, mounts};

const BASE: &str = "/imp.base";
const SCRATCH: &str = "/imp.scratch";
const ROOT: &str = "/imp.root";
/// The agent's own directory in the root.
pub(super) const IMP: &str = "/.imp";
/// The agent's binary, for PID 1 to start again.
pub(super) const AGENT: &str = "/.imp/agent";
/// Name of the entry point that starts the image's own init.
const INIT: &str = "/.imp/init";
/// The kernel has unpacked this program under this name.
const PROGRAM: &str = "/init";

/// Makes the root and moves into it. Returns the scratch disk's own root, of which the directory `plain` is for mounts.
pub(super) fn assemble(base: &Path, scratch: &Path) -> Result<OwnedFd, Error> {
    let mounted = |what: &str| {
        let what = what.to_owned();
        move |source: io::Error| Error::Mount { what, source }
    };
    for directory in [BASE, SCRATCH, ROOT] {
        mounts::make_directory(Path::new(directory)).map_err(failed("mount points"))?;
    }
    mount(base, BASE, "ext4", MountFlags::RDONLY, c"")
        .map_err(|error| mounted("the image's disk")(error.into()))?;
    // It is thrown away with the machine: nobody waits for what replaces a file to be on it.
    mount(scratch, SCRATCH, "ext4", MountFlags::NOATIME, c"noauto_da_alloc")
        .map_err(|error| mounted("the private disk")(error.into()))?;
    for directory in ["upper", "work", "plain"] {
        mounts::make_directory(&Path::new(SCRATCH).join(directory))
            .map_err(failed("directories of the private disk"))?;
    }
    let layers = CString::new(format!("lowerdir={BASE},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work"));
    let layers = layers.map_err(|_| failed("layers")(io::ErrorKind::InvalidInput.into()))?;
    mount("imp", ROOT, "overlay", MountFlags::empty(), layers.as_c_str())
        .map_err(|error| mounted("the overlay")(error.into()))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let scratch = rustix::fs::open(SCRATCH, flags, Mode::empty())
        .map_err(|error| failed("private disk")(error.into()))?;
    place_agent()?;
    mounts::move_to(ROOT)?;
    switch()?;
    mounts::rest();
    Ok(scratch)
}

/// The agent stays in the initramfs's memory; a small read-only file system holds mounts of it, which `rm -rf /` in the
/// guest cannot remove.
fn place_agent() -> Result<(), Error> {
    let below = |path: &str| format!("{ROOT}{path}");
    let step = failed("the agent's directory");
    let placed = (|| {
        mounts::make_directory(Path::new(modules::DIRECTORY))?;
        mounts::make_directory(Path::new(&below(IMP)))?;
        mount(
            "imp",
            below(IMP).as_str(),
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            c"mode=0755,size=64k",
        )?;
        for name in [AGENT, INIT] {
            File::create(below(name))?;
            mount_bind(PROGRAM, below(name).as_str())?;
        }
        mounts::make_directory(Path::new(&below(modules::IN_ROOT)))?;
        mount_bind(modules::DIRECTORY, below(modules::IN_ROOT).as_str())?;
        mount_remount(below(IMP).as_str(), MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV, c"")?;
        Ok(())
    })();
    placed.map_err(step)
}

/// Puts the root over the initramfs. The initramfs cannot be unmounted; its files but the program and the modules of
/// containers are gone already.
fn switch() -> Result<(), Error> {
    let switched = (|| {
        std::env::set_current_dir(ROOT)?;
        mount_move(ROOT, "/")?;
        rustix::process::chroot(".")?;
        std::env::set_current_dir("/")
    })();
    switched.map_err(failed("switch to it"))
}

fn failed(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Root { doing, source }
}
