//! What a guest boots from: a kernel, an initramfs made of its modules and the guest agent, and a command line.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::layout::Layout;
use crate::spec::KernelChoice;
use crate::status::KernelFacts;

mod initramfs;
pub(crate) use initramfs::{InitramfsCache, prune};

/// What the guest agent needs to know before anybody can tell it.
pub(crate) const COMMAND_LINE: &str = "imp.base=/dev/vda imp.scratch=/dev/vdb";

/// A kernel that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub facts: KernelFacts,
    /// Absent for a kernel with everything built in.
    modules: Option<PathBuf>,
}

impl KernelFacts {
    /// The choice that leads to this kernel again.
    pub(crate) fn choice(&self) -> KernelChoice {
        match &self.digest {
            Some(digest) => KernelChoice::Bundle(digest.clone()),
            None => KernelChoice::File(self.path.clone()),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn bundle_in(data: &Path, digest: &str) -> Layout {
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
}
