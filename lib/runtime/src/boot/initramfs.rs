//! The initramfs of a guest: the kernel's modules and the guest agent, one archive after the other, in the format of
//! Linux's Documentation/driver-api/early-userspace/buffer-format.rst.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use cpio::newc;
use sha2::{Digest, Sha256};

use super::{Error, Kernel};
use crate::layout::Layout;

/// Files that `prune` keeps: one for each kernel and agent that are in use at a time.
const KEPT: usize = 4;
/// End of the name of a file that is being written.
const UNFINISHED: &str = "new";

/// Initramfs files, made once for each pair of modules and agent.
#[derive(Debug, Default)]
pub(crate) struct InitramfsCache {
    /// The last pair that was hashed: almost always the next one, too.
    last: Mutex<Option<(Inputs, PathBuf)>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inputs(Vec<Input>);

/// A file as of a moment: enough to see that it was replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Input {
    path: PathBuf,
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl InitramfsCache {
    /// Path of the initramfs for this kernel and agent. Blocks on disk I/O.
    pub(crate) fn path(&self, layout: &Layout, kernel: &Kernel, agent: &Path) -> Result<PathBuf, Error> {
        let files = kernel.modules.iter().map(PathBuf::as_path).chain([agent]);
        let inputs = Inputs(files.map(identify).collect::<Result<_, _>>()?);
        let known = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if let Some((last, path)) = known
            && last == inputs
            && path.is_file()
        {
            return Ok(path);
        }
        let digest = digest(&inputs)?;
        let path = layout.initramfs().join(format!("{digest}.cpio"));
        if !path.is_file() {
            write(&path, kernel.modules.as_deref(), agent)?;
        }
        mark_as_used(&path);
        *self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((inputs, path.clone()));
        Ok(path)
    }
}

fn identify(path: &Path) -> Result<Input, Error> {
    let meta = fs::metadata(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    Ok(Input {
        path: path.to_owned(),
        device: meta.dev(),
        inode: meta.ino(),
        size: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
    })
}

fn digest(inputs: &Inputs) -> Result<String, Error> {
    let mut hash = Sha256::new();
    // Of the form that `write` gives it.
    hash.update(b"initramfs 1\n");
    for input in &inputs.0 {
        hash.update(input.size.to_le_bytes());
        File::open(&input.path)
            .and_then(|mut file| io::copy(&mut file, &mut hash))
            .map_err(|source| Error::Read { path: input.path.clone(), source })?;
    }
    Ok(hex::encode(hash.finalize()))
}

/// The kernel unpacks archives that stand one after the other, the first of them padded.
fn write(path: &Path, modules: Option<&Path>, agent: &Path) -> Result<(), Error> {
    let failed = |source| Error::Write { path: path.to_owned(), source };
    let read = |path: &Path| File::open(path).map_err(|source| Error::Read { path: path.to_owned(), source });
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory).map_err(failed)?;
    // A name of its own: two writers of the same file do not meet.
    let nonce = hex::encode(crate::random::bytes::<8>());
    let new = path.with_extension(format!("{nonce}.{UNFINISHED}"));
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&new).map_err(failed)?);
    if let Some(modules) = modules {
        let copied = io::copy(&mut read(modules)?, &mut out).map_err(failed)?;
        let zeros = [0; 3];
        let padding = (copied.wrapping_neg() % 4) as usize;
        out.write_all(zeros.get(..padding).unwrap_or_default()).map_err(failed)?;
    }
    let file = read(agent)?;
    let size = file.metadata().map_err(|source| Error::Read { path: agent.to_owned(), source })?.len();
    let size = u32::try_from(size).map_err(|_| Error::TooLarge { path: agent.to_owned() })?;
    let out = archive(out, file, size).map_err(failed)?;
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().and_then(|()| fs::rename(&new, path)).map_err(failed)
}

/// `agent` as the first program of the guest.
fn archive<W: Write>(out: W, agent: impl Read, size: u32) -> io::Result<W> {
    let out = newc::Builder::new("dev").ino(1).mode(0o040_755).nlink(1).write(out, 0).finish()?;
    // Opened by the kernel as the first process's stdin, stdout and stderr.
    let console =
        newc::Builder::new("dev/console").ino(2).mode(0o020_600).nlink(1).rdev_major(5).rdev_minor(1);
    let out = console.write(out, 0).finish()?;
    let mut init = newc::Builder::new("init").ino(3).mode(0o100_755).nlink(1).write(out, size);
    let copied = io::copy(&mut agent.take(u64::from(size)), &mut init)?;
    if copied != u64::from(size) {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    newc::trailer(init.finish()?)
}

/// Removes what earlier kernels and agents have left, and what was never finished. Only while no VM is about to start.
pub(crate) fn prune(layout: &Layout) {
    let unfinished = |path: &Path| path.extension().is_some_and(|extension| extension == UNFINISHED);
    let (unfinished, mut finished): (Vec<PathBuf>, Vec<PathBuf>) = fs::read_dir(layout.initramfs())
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .partition(|p| unfinished(p));
    finished.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).and_then(|meta| meta.modified()).ok()));
    for path in unfinished.iter().chain(finished.iter().skip(KEPT)) {
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "an old initramfs stays");
        }
    }
}

/// The time of a file tells `prune` when it was last of use.
fn mark_as_used(path: &Path) {
    let marked = File::options().write(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
    if let Err(error) = marked {
        tracing::debug!(path = %path.display(), %error, "the use of an initramfs is not marked");
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::boot::kernel;
    use crate::boot::tests::bundle_in;
    use crate::spec::KernelChoice;

    #[test]
    fn a_new_agent_makes_a_new_initramfs_and_the_same_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let layout = bundle_in(directory.path(), "abc");
        let kernel = kernel(&layout, &KernelChoice::Bundle("abc".into())).unwrap();
        let agent = directory.path().join("agent");
        let cache = InitramfsCache::default();
        fs::write(&agent, "one").unwrap();
        let one = cache.path(&layout, &kernel, &agent).unwrap();
        assert_eq!(cache.path(&layout, &kernel, &agent).unwrap(), one);
        assert!(fs::read(&one).unwrap().starts_with(b"modules\x00070701"));
        fs::write(&agent, "another").unwrap();
        let two = cache.path(&layout, &kernel, &agent).unwrap();
        assert_ne!(one, two);
        assert_eq!(fs::read_dir(layout.initramfs()).unwrap().count(), 2);
    }

    #[test]
    fn what_earlier_agents_have_left_is_pruned_and_what_was_used_last_stays() {
        let directory = tempfile::tempdir().unwrap();
        let layout = bundle_in(directory.path(), "abc");
        let kernel = kernel(&layout, &KernelChoice::Bundle("abc".into())).unwrap();
        let agent = directory.path().join("agent");
        let paths: Vec<PathBuf> = (0..KEPT + 2)
            .map(|version| {
                fs::write(&agent, version.to_string()).unwrap();
                let path = InitramfsCache::default().path(&layout, &kernel, &agent).unwrap();
                // Made in this order, however coarse the clock of the file system.
                let made = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(version as u64);
                File::options().write(true).open(&path).unwrap().set_modified(made).unwrap();
                path
            })
            .collect();
        let half = layout.initramfs().join("ab.00.new");
        fs::write(&half, "half").unwrap();
        // The oldest is of use again.
        fs::write(&agent, "0").unwrap();
        InitramfsCache::default().path(&layout, &kernel, &agent).unwrap();
        prune(&layout);
        let left: Vec<bool> = paths.iter().map(|path| path.exists()).collect();
        assert_eq!(left.iter().filter(|left| **left).count(), KEPT);
        assert!(left[0] && !left[1] && !half.exists(), "{left:?}");
    }

    #[test]
    fn another_program_finds_the_agent_as_init() {
        let bytes = archive(Vec::new(), &b"hello"[..], 5).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-i", "init"])
            .current_dir(&directory)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("apt-get install busybox-static");
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(fs::read(directory.path().join("init")).unwrap(), b"hello");
    }

    #[test]
    fn an_agent_that_shrank_while_it_was_read_is_an_error() {
        assert!(archive(Vec::new(), &b"hello"[..], 6).is_err());
    }
}
