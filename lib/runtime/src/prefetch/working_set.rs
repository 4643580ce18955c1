//! What a machine of a snapshot touches of its memory until it serves: found out from the first, kept beside the snapshot.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Pages, runs};
use crate::metering::Template;

/// More than this is none of ours.
const LARGEST: u64 = 16 << 20;
/// In a word of /proc/PID/pagemap: the page is in memory, or swapped out.
const TOUCHED: u64 = 0b11 << 62;
const WORD: usize = 8;

#[derive(Serialize, Deserialize)]
struct WorkingSet {
    page_size: u64,
    pages: Vec<Pages>,
}

fn place(memory: &Path) -> PathBuf {
    memory.with_file_name("working-set.json")
}

pub(crate) fn is_known(memory: &Path) -> bool {
    place(memory).exists()
}

/// Absent, also if it cannot be read: it is found out again.
pub(super) fn known(memory: &Path) -> Option<Vec<Pages>> {
    let mut text = Vec::new();
    File::open(place(memory)).ok()?.take(LARGEST).read_to_end(&mut text).ok()?;
    let set: WorkingSet = serde_json::from_slice(&text).ok()?;
    (set.page_size == rustix::param::page_size() as u64).then_some(set.pages)
}

/// Writes down what the process, whose machine maps the snapshot's memory, has touched of it so far.
pub(crate) fn find_out(memory: &Path, vmm: u32) -> io::Result<()> {
    let page_size = rustix::param::page_size() as u64;
    let Some(template) = Template::of(memory) else { return Err(io::ErrorKind::NotFound.into()) };
    let maps = fs::read_to_string(format!("/proc/{vmm}/maps"))?;
    let pagemap = File::open(format!("/proc/{vmm}/pagemap"))?;
    let length = fs::metadata(memory)?.size().div_ceil(page_size);
    let mut touched = vec![false; usize::try_from(length).map_err(io::Error::other)?];
    for mapping in mappings(&maps, template) {
        let first = usize::try_from(mapping.offset / page_size).map_err(io::Error::other)?;
        let count = usize::try_from((mapping.end - mapping.start) / page_size).map_err(io::Error::other)?;
        let mut words = vec![0; count * WORD];
        pagemap.read_exact_at(&mut words, mapping.start / page_size * WORD as u64)?;
        let (words, _) = words.as_chunks::<WORD>();
        for (page, word) in touched.iter_mut().skip(first).zip(words) {
            *page |= u64::from_ne_bytes(*word) & TOUCHED != 0;
        }
    }
    let pages = runs(touched.into_iter());
    // It has ended, or is no such machine.
    if pages.is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let (path, new) = (place(memory), memory.with_file_name(format!("working-set.{vmm}")));
    fs::write(&new, serde_json::to_vec(&WorkingSet { page_size, pages })?)?;
    fs::rename(&new, path)
}

#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    /// In the file.
    offset: u64,
}

/// Of this file, from the format of /proc/PID/maps.
fn mappings(maps: &str, of: Template) -> Vec<Mapping> {
    let mapping = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let offset = number(fields.nth(1)?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = (u32::try_from(number(major)?).ok()?, u32::try_from(number(minor)?).ok()?);
        let template = Template { device, inode: fields.next()?.parse().ok()? };
        let (start, end) = (number(start)?, number(end)?);
        (template == of && start <= end).then_some(Mapping { start, end, offset })
    };
    maps.lines().filter_map(mapping).collect()
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "ranges of pages are the elements")]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_one_file_are_told_from_all_others() {
        let maps = "\
7f0000000000-7f0000003000 rw-p 00001000 fe:00 42                         /some/memory (deleted)
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000005000 r-xp 00000000 fe:01 42                         /usr/bin/vmm
nonsense
";
        let found = mappings(maps, Template { device: (0xfe, 0), inode: 42 });
        assert_eq!(found, [Mapping { start: 0x7f00_0000_0000, end: 0x7f00_0000_3000, offset: 0x1000 }]);
    }

    #[test]
    fn a_set_that_is_damaged_or_of_other_pages_is_not_known() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("memory");
        assert_eq!(known(&memory), None);
        fs::write(place(&memory), "{").unwrap();
        assert_eq!(known(&memory), None);
        let page_size = rustix::param::page_size() as u64;
        for (size, there) in [(page_size, Some(vec![3..4])), (page_size * 2, None)] {
            let set = WorkingSet { page_size: size, pages: vec![3..4] };
            fs::write(place(&memory), serde_json::to_vec(&set).unwrap()).unwrap();
            assert_eq!(known(&memory), there);
        }
    }

    #[test]
    fn a_process_that_does_not_map_the_memory_tells_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("memory");
        fs::write(&memory, [0; 8192]).unwrap();
        assert!(find_out(&memory, std::process::id()).is_err());
        assert!(!is_known(&memory));
    }
}
