//! Hands out blocks: first those that hidden files gave back and that fit best, else the next that was never used.

use std::collections::{BTreeMap, BTreeSet};

/// Blocks in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) blocks: u64,
}

pub(super) struct Allocator {
    next: u64,
    end: u64,
    /// Start to length; no two runs touch.
    free: BTreeMap<u64, u64>,
    /// The same runs as (length, start).
    by_length: BTreeSet<(u64, u64)>,
}

impl Allocator {
    /// Hands out blocks of `first..end`.
    pub(super) fn new(first: u64, end: u64) -> Self {
        Self { next: first, end, free: BTreeMap::new(), by_length: BTreeSet::new() }
    }

    /// `blocks` in a row, or nothing if the end is reached.
    pub(super) fn take(&mut self, blocks: u64) -> Option<Run> {
        if let Some((length, start)) = self.by_length.range((blocks, 0)..).next().copied() {
            self.remove(start, length);
            if length > blocks {
                self.insert(start + blocks, length - blocks);
            }
            return Some(Run { start, blocks });
        }
        self.take_unused(blocks)
    }

    /// `blocks` in a row that were never written, so that they read as zeros.
    pub(super) fn take_unused(&mut self, blocks: u64) -> Option<Run> {
        let after = self.next.checked_add(blocks).filter(|after| *after <= self.end)?;
        let run = Run { start: self.next, blocks };
        self.next = after;
        Some(run)
    }

    pub(super) fn give_back(&mut self, run: Run) {
        let (mut start, mut blocks) = (run.start, run.blocks);
        if let Some((before, length)) = self.free.range(..start).next_back().map(|(s, l)| (*s, *l))
            && before + length == start
        {
            self.remove(before, length);
            (start, blocks) = (before, blocks + length);
        }
        if let Some(length) = self.free.get(&(start + blocks)).copied() {
            self.remove(start + blocks, length);
            blocks += length;
        }
        self.insert(start, blocks);
    }

    /// The first block that was never handed out.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// What was given back and not handed out again, by position.
    pub(super) fn free_runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.free.iter().map(|(start, blocks)| Run { start: *start, blocks: *blocks })
    }

    fn insert(&mut self, start: u64, length: u64) {
        self.free.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn remove(&mut self, start: u64, length: u64) {
        self.free.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_given_back_merge_with_their_neighbours_and_serve_the_best_fit() {
        let mut allocator = Allocator::new(10, 1000);
        let runs: Vec<Run> = [4, 4, 4, 8].iter().map(|n| allocator.take(*n).unwrap()).collect();
        allocator.give_back(runs[0]);
        allocator.give_back(runs[2]);
        allocator.give_back(runs[1]);
        assert_eq!(allocator.free_runs().collect::<Vec<_>>(), [Run { start: 10, blocks: 12 }]);
        assert_eq!(allocator.take(5), Some(Run { start: 10, blocks: 5 }));
        assert_eq!(
            allocator.take(8),
            Some(Run { start: 30, blocks: 8 }),
            "nothing given back is long enough"
        );
        assert_eq!(allocator.take(7), Some(Run { start: 15, blocks: 7 }));
        assert_eq!(allocator.take(1000), None);
    }
}
