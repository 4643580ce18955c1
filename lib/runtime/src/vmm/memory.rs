//! What was found out by a trial, kept for as long as it holds: this boot, this program, this user, this /dev/kvm.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::process;

/// Whether an earlier answer is good enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// One under the same circumstances is.
    Remembered,
    Now,
}

/// What an answer holds for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Circumstances {
    boot_id: String,
    program: PathBuf,
    inode: u64,
    size: u64,
    modified: i64,
    /// Whether /dev/kvm was there, and for whom: a user who gains access must not be told of the time before.
    device: Option<(u32, u32, u32)>,
    uid: u32,
}

impl Circumstances {
    pub(crate) fn now(program: &Path) -> io::Result<Self> {
        let meta = fs::metadata(program)?;
        let device = fs::metadata("/dev/kvm").ok().map(|m| (m.mode(), m.uid(), m.gid()));
        Ok(Self {
            boot_id: process::boot_id().map_err(io::Error::other)?,
            program: program.to_owned(),
            inode: meta.ino(),
            size: meta.size(),
            modified: meta.mtime(),
            device,
            uid: rustix::process::geteuid().as_raw(),
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Remembered<T> {
    circumstances: Circumstances,
    found: T,
}

/// The answer that was kept under the same circumstances. A file that cannot be read is no answer.
pub(crate) fn recall<T: DeserializeOwned>(file: &Path, circumstances: &Circumstances) -> Option<T> {
    let remembered: Remembered<T> = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (remembered.circumstances == *circumstances).then_some(remembered.found)
}

pub(crate) fn keep<T: Serialize>(file: &Path, circumstances: Circumstances, found: &T) -> io::Result<()> {
    let text = serde_json::to_vec(&Remembered { circumstances, found })?;
    let new = file.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(&new, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_for_the_circumstances_it_was_found_under_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory.json");
        let here = Circumstances::now(Path::new("/bin/sh")).unwrap();
        assert_eq!(recall::<u32>(&file, &here), None);
        keep(&file, here.clone(), &7).unwrap();
        assert_eq!(recall::<u32>(&file, &here), Some(7));
        let others = [
            Circumstances { boot_id: "another boot".into(), ..here.clone() },
            Circumstances { inode: here.inode + 1, ..here.clone() },
            Circumstances { device: Some((0, 0, 0)), ..here.clone() },
            Circumstances { uid: here.uid + 1, ..here.clone() },
        ];
        assert!(others.iter().all(|other| recall::<u32>(&file, other).is_none()));
        fs::write(&file, "half a fi").unwrap();
        assert_eq!(recall::<u32>(&file, &here), None);
    }
}
