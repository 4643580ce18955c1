//! Network namespaces: made and entered on threads of their own, so that no thread of the caller ever changes its network.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic;
use std::path::Path;
use std::thread;

use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The calling thread's own network namespace, whichever thread that is.
const OF_THIS_THREAD: &str = "/proc/thread-self/ns/net";

/// From <linux/magic.h>: the file system of namespace files.
const NSFS_MAGIC: rustix::fs::FsWord = 0x6e73_6673;

/// The network namespace that the calling thread is in.
pub fn current() -> io::Result<OwnedFd> {
    Ok(File::open(OF_THIS_THREAD)?.into())
}

/// A new, empty network namespace, which lives as long as the descriptor.
pub fn create() -> io::Result<OwnedFd> {
    on_own_thread(|| {
        leave_for_new()?;
        current()
    })?
}

/// A new, empty network namespace, kept by a mount on the file `path`, which is made if it is missing. It lives until
/// [`remove_at`], whatever happens to this process.
pub fn create_at(path: &Path) -> io::Result<OwnedFd> {
    OpenOptions::new().create(true).append(true).open(path)?;
    on_own_thread(|| {
        leave_for_new()?;
        rustix::mount::mount_bind(OF_THIS_THREAD, path)?;
        current()
    })?
}

/// Whether `path` is a kept namespace; a plain file there is what a crash in [`create_at`] leaves.
pub fn is_at(path: &Path) -> io::Result<bool> {
    match rustix::fs::statfs(path) {
        Ok(found) => Ok(found.f_type == NSFS_MAGIC),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Lets go of the namespace kept at `path` and removes the file; nothing to do is success.
pub fn remove_at(path: &Path) -> io::Result<()> {
    // Detached, so that somebody who still looks at the file does not keep it; and as often as it was mounted.
    while is_at(path)? {
        rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Does `work` inside the namespace, on a thread that ends with it. Sockets opened there stay in that namespace
/// wherever they are used; `/proc/sys/net` is that namespace's.
pub fn inside<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_own_thread(|| {
        rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(work())
    })?
}

fn leave_for_new() -> io::Result<()> {
    // SAFETY: the descriptor table stays shared: only the network namespace is unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, work)?;
        thread.join().or_else(|panic| panic::resume_unwind(panic))
    })
}
