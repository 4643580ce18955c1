//! Has what machines of a snapshot read of its memory in the page cache before they need it, and has the runtime pay for it:
//! whoever reads a page first does, and it is there for all.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::thread;

use imp_sys::page_cache;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::cgroup;

pub(crate) mod working_set;

/// Numbers of pages.
type Pages = Range<u64>;

/// Reads what is missing. Returns when a machine that is activated finds its working set there, or, where that is not known,
/// all that the snapshot holds.
pub(crate) fn prefetch(memory: &Path) {
    if let Err(error) = read_missing(memory) {
        tracing::debug!(path = %memory.display(), %error, "a snapshot is read when it is needed");
    }
}

fn read_missing(memory: &Path) -> io::Result<()> {
    let file = File::open(memory)?;
    let length = file.metadata()?.len();
    let resident = page_cache::resident(&file, usize::try_from(length).map_err(io::Error::other)?)?;
    let plan = Plan::new(&data(&file)?, working_set::known(memory).as_deref(), &resident);
    if !plan.now.is_empty() {
        read(&file, &plan.now)?;
    }
    if !plan.later.is_empty() {
        let read_later = move || {
            if let Err(error) = read(&file, &plan.later) {
                tracing::debug!(%error, "the rest of a snapshot is read when it is needed");
            }
        };
        thread::Builder::new().name("prefetch".to_owned()).spawn(read_later)?;
    }
    Ok(())
}

/// What is to be read, and what of it before a machine goes on.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    now: Vec<Pages>,
    later: Vec<Pages>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    No,
    Now,
    Later,
}

impl Plan {
    /// `data`: what is no hole. `working_set`: what a machine needs to come to life, holes too; they take memory, once somebody
    /// has read them. `resident`: for each page, whether it is there.
    fn new(data: &[Pages], working_set: Option<&[Pages]>, resident: &[bool]) -> Self {
        let mut wanted = vec![Wanted::No; resident.len()];
        let mut want = |pages: &[Pages], when: Wanted| {
            for range in pages {
                let start = usize::try_from(range.start).unwrap_or(usize::MAX);
                let count = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
                wanted.iter_mut().skip(start).take(count).for_each(|page| *page = when);
            }
        };
        want(data, if working_set.is_some() { Wanted::Later } else { Wanted::Now });
        want(working_set.unwrap_or_default(), Wanted::Now);
        for (page, _) in wanted.iter_mut().zip(resident).filter(|(_, resident)| **resident) {
            *page = Wanted::No;
        }
        let of = |when| runs(wanted.iter().map(move |page| *page == when));
        Self { now: of(Wanted::Now), later: of(Wanted::Later) }
    }
}

/// Where this holds.
fn runs(holds: impl Iterator<Item = bool>) -> Vec<Pages> {
    let mut runs: Vec<Pages> = Vec::new();
    for (number, _) in (0_u64..).zip(holds).filter(|(_, holds)| *holds) {
        match runs.last_mut().filter(|last| last.end == number) {
            Some(last) => last.end = number + 1,
            None => runs.push(number..number + 1),
        }
    }
    runs
}

fn read(file: &File, pages: &[Pages]) -> io::Result<()> {
    let page = rustix::param::page_size() as u64;
    let parts: Vec<Range<u64>> = pages.iter().map(|pages| pages.start * page..pages.end * page).collect();
    let group = cgroup::shared_memory()
        .map_err(io::Error::other)
        .and_then(|group| OpenOptions::new().write(true).open(group.join("cgroup.procs")));
    match group {
        Ok(group) => page_cache::read_for(group.as_fd(), file.as_fd(), &parts),
        Err(error) => {
            tracing::debug!(%error, "this process pays for what it reads of a snapshot");
            page_cache::read(file.as_fd(), &parts)
        }
    }
}

/// Pages of which something is allocated.
fn data(file: &File) -> io::Result<Vec<Pages>> {
    let page = rustix::param::page_size() as u64;
    let (mut found, mut position) = (Vec::new(), 0);
    loop {
        let start = match seek(file, SeekFrom::Data(position)) {
            Ok(start) => start,
            // Behind the last data.
            Err(Errno::NXIO) => return Ok(found),
            Err(error) => return Err(error.into()),
        };
        position = seek(file, SeekFrom::Hole(start))?;
        found.push(start / page..position.div_ceil(page));
    }
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    clippy::reversed_empty_ranges,
    reason = "ranges of pages are the elements, and a file may say anything"
)]
mod tests {
    use super::*;

    #[test]
    fn without_a_working_set_all_that_is_missing_is_read_before_a_machine_goes_on() {
        let resident = [false, true, false, false, false];
        let plan = Plan::new(&[0..3], None, &resident);
        assert_eq!(plan, Plan { now: vec![0..1, 2..3], later: vec![] });
    }

    #[test]
    fn a_working_set_is_read_first_with_its_holes_and_the_rest_of_the_data_later() {
        let resident = [false, false, true, false, false, false];
        let plan = Plan::new(&[0..4], Some(&[1..3, 5..6]), &resident);
        assert_eq!(plan, Plan { now: vec![1..2, 5..6], later: vec![0..1, 3..4] });
    }

    #[test]
    fn nothing_is_read_twice_nor_behind_the_end() {
        assert_eq!(Plan::new(&[0..9], Some(&[3..u64::MAX]), &[true; 4]), Plan { now: vec![], later: vec![] });
        let plan = Plan::new(&[], Some(&[3..u64::MAX, 9..2]), &[false; 4]);
        assert_eq!(plan, Plan { now: vec![3..4], later: vec![] });
    }
}
