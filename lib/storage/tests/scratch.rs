//! Scratch disks: sound at every size, sparse, copied without their holes.

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;
    use std::process::Command;

    use imp_storage::disk::{
        Error, Placement, SMALLEST_SCRATCH, clone_scratch, create_scratch, place_immutable, remove_leftovers,
    };

    fn assert_clean(path: &Path) {
        let check = Command::new("e2fsck").arg("-fn").arg(path).output();
        let check = check.expect("e2fsck is installed: apt-get install e2fsprogs");
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    }

    fn debugfs(path: &Path, command: &str) -> String {
        let output = Command::new("debugfs").args(["-w", "-R", command]).arg(path).output();
        let output = output.expect("debugfs is installed: apt-get install e2fsprogs");
        String::from_utf8(output.stdout).unwrap()
    }

    fn allocated(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().blocks() * 512
    }

    #[test]
    fn a_scratch_disk_of_any_size_is_sound_sparse_and_has_its_directories() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("scratch");
        // Around the borders of groups (128 MiB), and where metadata fills groups of its own.
        let sizes = [
            SMALLEST_SCRATCH,
            5 << 20,
            (128 << 20) - 4096,
            128 << 20,
            (128 << 20) + 4097,
            129 << 20,
            3 << 30,
        ];
        for bytes in sizes.into_iter().chain([100_u64 << 30, 1 << 40]) {
            create_scratch(&path, bytes).unwrap();
            let names = debugfs(&path, "ls -p /");
            for name in ["upper", "work", "plain"] {
                assert!(names.contains(&format!("/040755/0/0/{name}/")), "{bytes}: {names}");
            }
            let size = std::fs::metadata(&path).unwrap().len();
            assert!(size <= bytes && bytes - size < (1 << 18), "{bytes}: {size}");
            assert!(allocated(&path) <= (128 << 10) + bytes / 50_000, "{bytes}: {}", allocated(&path));
            if bytes <= 3 << 30 {
                assert_clean(&path);
            }
        }
        assert_eq!(remove_leftovers(directory.path()).unwrap(), 0);
    }

    #[test]
    fn a_scratch_disk_takes_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("scratch");
        create_scratch(&path, 300 << 20).unwrap();
        let content = directory.path().join("content");
        std::fs::write(&content, vec![b'x'; 5 << 20]).unwrap();
        for n in 0..20 {
            debugfs(&path, &format!("write {} upper/file-{n}", content.display()));
        }
        assert_clean(&path);
        assert!(debugfs(&path, "ls /upper").contains("file-19"));
    }

    #[test]
    fn a_size_that_cannot_be_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for bytes in [0, SMALLEST_SCRATCH - 1, u64::MAX] {
            let error = create_scratch(&directory.path().join("scratch"), bytes).unwrap_err();
            assert!(matches!(error, Error::Size { bytes: refused, .. } if refused == bytes));
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_clone_has_the_same_bytes_and_holes_and_a_life_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        create_scratch(&from, 64 << 20).unwrap();
        let file = std::fs::File::options().write(true).open(&from).unwrap();
        file.write_all_at(b"far", (64 << 20) - 5000).unwrap();
        std::fs::write(&to, "replaced").unwrap();
        let placement = clone_scratch(&from, &to).unwrap();
        assert!(matches!(placement, Placement::Reflinked | Placement::Copied));
        assert!(allocated(&to) <= allocated(&from));
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        file.write_all_at(b"changed", (64 << 20) - 5000).unwrap();
        assert!(std::fs::read(&from).unwrap() != std::fs::read(&to).unwrap());
    }

    #[test]
    fn an_immutable_file_is_linked_where_possible_and_copied_to_another_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let from = directory.path().join("from");
        std::fs::write(&from, "image").unwrap();
        let beside = directory.path().join("beside");
        assert_eq!(place_immutable(&from, &beside).unwrap(), Placement::Linked);
        assert!(matches!(place_immutable(&from, &beside), Err(Error::Copy { .. })), "nothing is replaced");

        let elsewhere = tempfile::tempdir_in("/dev/shm").expect("/dev/shm is a file system of its own");
        let copy = elsewhere.path().join("copy");
        assert_eq!(place_immutable(&from, &copy).unwrap(), Placement::Copied);
        assert_eq!(std::fs::read(&copy).unwrap(), b"image");
    }

    #[test]
    fn a_copy_of_what_is_not_there_names_both_files() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let error = clone_scratch(&from, &to).unwrap_err();
        assert!(matches!(&error, Error::Copy { from: f, to: t, .. } if *f == from && *t == to), "{error}");
    }

    /// Runs one ignored test of this program in a mount namespace with a small /mnt.
    #[test]
    fn a_full_disk_is_named() {
        let script =
            "mount -t tmpfs -o size=1m none /mnt && exec \"$0\" --exact tests::needs_two_mebibytes --ignored";
        let mut child = Command::new("unshare");
        child.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(std::env::current_exe().unwrap());
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "run by a_full_disk_is_named, where there is no room"]
    fn needs_two_mebibytes() {
        let directory = tempfile::tempdir().unwrap();
        let from = directory.path().join("from");
        std::fs::write(&from, vec![1; 2 << 20]).unwrap();
        let to = Path::new("/mnt/to");
        assert!(matches!(clone_scratch(&from, to), Err(Error::DiskFull { path, .. }) if path == to));
        assert_eq!(std::fs::read_dir("/mnt").unwrap().count(), 0);
    }
}
