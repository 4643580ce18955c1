//! What a guest boots from: a kernel, an initramfs made of its modules and the guest agent, and a command line.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sha2::{Digest, Sha256};

use crate::cpio::Archive;
use crate::layout::Layout;
use crate::spec::KernelChoice;
use crate::status::KernelFacts;

/// Name of the channel in the guest.
pub(crate) const CHANNEL: &str = "imp.agent.0";
/// What the guest agent needs to know before anybody can tell it.
pub(crate) const COMMAND_LINE: &str = "imp.base=/dev/vda imp.scratch=/dev/vdb imp.channel=imp.agent.0";

/// A kernel that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub facts: KernelFacts,
    /// Absent for a kernel with everything built in.
    modules: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no guest kernel is installed in {}: run `./dev setup`, or name one with --kernel", path.display())]
    NoDefault { path: PathBuf },
    #[error("no guest kernel {digest} is installed in {}", path.display())]
    NoBundle { digest: String, path: PathBuf },
    #[error("cannot read the kernel {}", path.display())]
    Kernel {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not an uncompressed 64-bit ELF kernel (vmlinux)", path.display())]
    NotAnElf { path: PathBuf },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the guest agent {} is too large for an initramfs", path.display())]
    TooLarge { path: PathBuf },
    #[error("cannot write the initramfs {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Finds the kernel that was asked for.
pub(crate) fn kernel(layout: &Layout, choice: &KernelChoice) -> Result<Kernel, Error> {
    let kernels = layout.kernels();
    match choice {
        KernelChoice::Default => {
            let path = kernels.join("default");
            let target = fs::canonicalize(&path).map_err(|_| Error::NoDefault { path: kernels })?;
            let digest = target.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
            bundle(&target, digest)
        }
        KernelChoice::Bundle(digest) => {
            let plain = digest.bytes().all(|b| b.is_ascii_alphanumeric());
            let path = kernels.join(digest);
            if !plain || digest.is_empty() || !path.is_dir() {
                return Err(Error::NoBundle { digest: digest.clone(), path: kernels });
            }
            bundle(&path, digest.clone())
        }
        KernelChoice::File(path) => {
            check_elf(path)?;
            let facts = KernelFacts { path: path.clone(), digest: None, release: None };
            Ok(Kernel { facts, modules: None })
        }
    }
}

fn bundle(directory: &Path, digest: String) -> Result<Kernel, Error> {
    let path = directory.join("vmlinux");
    check_elf(&path)?;
    let release = fs::read_to_string(directory.join("release")).ok().map(|text| text.trim().to_owned());
    let facts = KernelFacts { path, digest: Some(digest), release };
    Ok(Kernel { facts, modules: Some(directory.join("modules.cpio")) })
}

/// Refuses at once what would leave a machine without a sign of life.
fn check_elf(path: &Path) -> Result<(), Error> {
    use std::io::Read;
    let mut head = [0; 5];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut head))
        .map_err(|source| Error::Kernel { path: path.to_owned(), source })?;
    if head == *b"\x7fELF\x02" { Ok(()) } else { Err(Error::NotAnElf { path: path.to_owned() }) }
}

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

/// The kernel unpacks archives that stand one after the other.
fn write(path: &Path, modules: Option<&Path>, agent: &Path) -> Result<(), Error> {
    let failed = |source| Error::Write { path: path.to_owned(), source };
    let read = |path: &Path| File::open(path).map_err(|source| Error::Read { path: path.to_owned(), source });
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory).map_err(failed)?;
    // A name of its own: two writers of the same file do not meet.
    let nonce = hex::encode(crate::random::bytes::<8>());
    let new = path.with_extension(format!("{nonce}.new"));
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
    let mut archive = Archive::new(out);
    let entries = || -> io::Result<()> {
        archive.directory("dev")?;
        // Opened by the kernel as the first process's stdin, stdout and stderr.
        archive.character_device("dev/console", 0o600, (5, 1))?;
        archive.file("init", 0o755, size, file)
    };
    entries().map_err(failed)?;
    let out = archive.finish().map_err(failed)?;
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().and_then(|()| fs::rename(&new, path)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle_in(data: &Path, digest: &str) -> Layout {
        let layout = Layout::new(data.to_owned(), data.join("run"));
        let directory = layout.kernels().join(digest);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("vmlinux"), b"\x7fELF\x02rest").unwrap();
        fs::write(directory.join("modules.cpio"), b"modules").unwrap();
        fs::write(directory.join("release"), "6.12.0\n").unwrap();
        layout
    }

    #[test]
    fn a_kernel_that_is_not_there_says_how_to_get_one() {
        let directory = tempfile::tempdir().unwrap();
        let layout = bundle_in(directory.path(), "abc");
        let error = kernel(&layout, &KernelChoice::Default).unwrap_err();
        assert!(error.to_string().contains("./dev setup"), "{error}");
        std::os::unix::fs::symlink("abc", layout.kernels().join("default")).unwrap();
        let found = kernel(&layout, &KernelChoice::Default).unwrap();
        assert_eq!(found.facts.digest.as_deref(), Some("abc"));
        assert_eq!(found.facts.release.as_deref(), Some("6.12.0"));
        assert!(matches!(
            kernel(&layout, &KernelChoice::Bundle("../abc".into())),
            Err(Error::NoBundle { .. })
        ));
        let script = directory.path().join("script");
        fs::write(&script, "#!/bin/sh").unwrap();
        assert!(matches!(kernel(&layout, &KernelChoice::File(script)), Err(Error::NotAnElf { .. })));
    }

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
}
