//! Pins: files that say who needs an image, a disk or a snapshot. They outlive their makers, and are cleared by owner. A power failure
//! ends the VMs that they are for, too, so they are not synced.

use std::fs::{self, OpenOptions};
use std::io;

use super::Pin;
use super::error::Error;
use super::layout::Layout;
use super::lock::{StoreLock, entries};
use crate::blob::digest::Digest;
use crate::blob::write_error;

pub(crate) fn add(layout: &Layout, key: &Digest, owner: &str) -> Result<(), Error> {
    check(owner)?;
    let _using = StoreLock::shared(layout)?;
    if ![layout.disk(key), layout.image(key), layout.snapshot(key)].iter().any(|path| path.exists()) {
        return Err(Error::NothingToPin(*key));
    }
    let path = layout.pin(key, owner);
    let made = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    made.map(drop).map_err(|source| write_error(&path, source).into())
}

pub(crate) fn remove(layout: &Layout, key: &Digest, owner: &str) -> Result<(), Error> {
    check(owner)?;
    let path = layout.pin(key, owner);
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(write_error(&path, source).into()),
        _ => Ok(()),
    }
}

pub(crate) fn list(layout: &Layout) -> Result<Vec<Pin>, Error> {
    let mut pins: Vec<Pin> = entries(&layout.pins())?
        .iter()
        .filter_map(|path| {
            let (owner, hex) = path.file_name()?.to_str()?.rsplit_once('@')?;
            Some(Pin { owner: owner.to_owned(), key: Digest::from_hex(hex).ok()? })
        })
        .collect();
    pins.sort();
    Ok(pins)
}

fn check(owner: &str) -> Result<(), Error> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    if (1..=128).contains(&owner.len()) && owner.bytes().all(good) {
        Ok(())
    } else {
        Err(Error::Owner(owner.chars().take(200).collect()))
    }
}
