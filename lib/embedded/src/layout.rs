//! Every path of the owner itself.

use std::path::{Path, PathBuf};

/// Where one user's owner keeps its things.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Kept over a reboot: images, kernels, records, disks, logs.
    pub data: PathBuf,
    /// Sockets and locks, gone after a reboot; only its user may enter.
    pub runtime: PathBuf,
}

impl Layout {
    pub fn socket(&self) -> PathBuf {
        self.runtime.join("owner.sock")
    }

    /// Where the owner gives lanes to clients: see `imp_protocol::lane`.
    pub fn lane_socket(&self) -> PathBuf {
        self.runtime.join("lanes.sock")
    }

    /// Held by the one owner that lives.
    pub fn lock(&self) -> PathBuf {
        self.runtime.join("owner.lock")
    }

    /// What the owner has to say; see [`crate::log`] for its bound.
    pub fn log(&self) -> PathBuf {
        self.data.join("owner.log")
    }

    pub fn images(&self) -> PathBuf {
        imp_runtime::layout::images(&self.data)
    }

    /// Which snapshot a template's name leads to: a record for each name.
    pub fn template_names(&self) -> PathBuf {
        self.data.join("template-names")
    }

    /// A record for each warm pool.
    pub fn pools(&self) -> PathBuf {
        self.data.join("pools")
    }

    /// What is on record of VMs; there is none before the first one.
    pub fn vms(&self) -> PathBuf {
        imp_runtime::layout::vms(&self.data)
    }
}

/// Makes a directory that only its user may enter, and says so if it is somebody else's.
pub fn make_private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let metadata = std::fs::metadata(directory)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_that_others_may_enter_is_closed() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("a/b");
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
        make_private(&directory).unwrap();
        assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
