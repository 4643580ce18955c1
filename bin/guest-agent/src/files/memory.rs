//! Memory that a file's content passes through.
//!
//! A disk takes neighbouring memory in one request; scattered pages are a request for each of them where a VMM offers but
//! one segment, as Firecracker does. So a whole piece lies in one huge page, if the kernel has one.

use memmap2::{Advice, MmapMut};
use rustix::io::Errno;

use super::CHUNK;

/// Of the kernel, on this architecture.
const HUGE_PAGE: usize = 2 << 20;

/// Cleared when it is new; given back to the kernel when it is dropped.
#[derive(Debug)]
pub(super) struct Memory {
    map: MmapMut,
    start: usize,
    length: usize,
}

impl Memory {
    /// For at least so many bytes: no more than a chunk for a small file, at most a huge page.
    pub(super) fn new(bytes: usize) -> Result<Self, Errno> {
        if bytes <= CHUNK {
            return Ok(Self { map: map(CHUNK)?, start: 0, length: CHUNK });
        }
        // Twice as many addresses, so that a whole huge page lies among them; the first use makes memory of all of that page.
        let map = map(2 * HUGE_PAGE)?;
        // A kernel without huge pages refuses, and gives small ones.
        let _ = map.advise(Advice::HugePage);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Self { map, start, length: HUGE_PAGE })
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.map.get(self.start..self.start + self.length).unwrap_or_default()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}

fn map(bytes: usize) -> Result<MmapMut, Errno> {
    MmapMut::map_anon(bytes).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_room_for_what_is_asked_of_it() {
        for bytes in [0, 1, CHUNK, CHUNK + 1, HUGE_PAGE] {
            let mut memory = Memory::new(bytes).unwrap();
            assert!(memory.length() >= bytes && memory.bytes_mut().len() == memory.length());
        }
    }

    #[test]
    fn a_whole_piece_may_lie_in_one_huge_page() {
        let memory = Memory::new(HUGE_PAGE).unwrap();
        let start = memory.bytes().as_ptr().addr();
        assert!(start.is_multiple_of(HUGE_PAGE));
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut holds = false;
        let flags = mappings.lines().find(|line| {
            if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-')) {
                let [from, to] = [from, to].map(|at| usize::from_str_radix(at, 16).unwrap_or(0));
                holds = (from..to).contains(&start);
            }
            holds && line.starts_with("VmFlags:")
        });
        assert!(flags.unwrap().split(' ').any(|flag| flag == "hg"), "{flags:?}");
    }
}
