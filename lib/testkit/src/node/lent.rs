//! What one test of a node has found out by a trial, lent to those after it: each gets a copy of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{NODE_DISK, is_node};

/// In a data directory: what drivers found out by running a guest. The engine asks each whether it holds for the program, the
/// user and the boot of the machine, and tries again if not.
const TRIALS: [&str; 2] = ["firecracker.json", "probes.json"];

/// Puts what is known into a new data directory.
pub(crate) fn to(data: &Path) -> io::Result<()> {
    if is_node() { copy(&kept(), data) } else { Ok(()) }
}

/// Keeps what was found out in this data directory, for the tests after this one. What holds for an ordinary user helps none
/// of them, and he has no place to keep it.
pub fn keep(data: &Path) -> io::Result<()> {
    let is_kept = is_node() && rustix::process::geteuid().is_root();
    if is_kept { copy(data, &kept()) } else { Ok(()) }
}

fn kept() -> PathBuf {
    Path::new(NODE_DISK).join("trials")
}

/// Those that are not there yet; half of one is never seen.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for name in TRIALS {
        let (source, target) = (from.join(name), to.join(name));
        if source.is_file() && !target.exists() {
            let new = to.join(format!("{name}.copy"));
            fs::copy(&source, &new)?;
            fs::rename(&new, &target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_stays_and_the_rest_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        fs::create_dir(&one).unwrap();
        fs::write(one.join("firecracker.json"), "1").unwrap();
        fs::write(one.join("else.json"), "1").unwrap();
        copy(&one, &other).unwrap();
        fs::write(one.join("firecracker.json"), "2").unwrap();
        fs::write(one.join("probes.json"), "2").unwrap();
        copy(&one, &other).unwrap();
        let read = |name: &str| fs::read_to_string(other.join(name)).unwrap();
        assert_eq!((read("firecracker.json"), read("probes.json")), ("1".into(), "2".into()));
        assert_eq!(fs::read_dir(&other).unwrap().count(), 2);
    }
}
