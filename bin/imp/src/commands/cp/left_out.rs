//! What was not copied, by name.

use std::path::{Path, PathBuf};

use crate::output;

/// Names that are kept: a guest may have any number of such files.
const MOST_NAMED: usize = 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    named: Vec<(PathBuf, &'static str)>,
    unnamed: u64,
}

impl LeftOut {
    /// `kind`: "a socket".
    pub(super) fn add(&mut self, path: &Path, kind: &'static str) {
        if self.named.len() < MOST_NAMED {
            self.named.push((path.to_owned(), kind));
        } else {
            self.unnamed += 1;
        }
    }

    pub(super) fn is_something(&self) -> bool {
        !self.named.is_empty()
    }

    pub(super) fn warn(&self) {
        for line in self.lines() {
            output::warn(&output::printable(&line));
        }
    }

    fn lines(&self) -> Vec<String> {
        let line = |(path, kind): &(PathBuf, &str)| format!("{} is {kind} and was left out", path.display());
        let mut lines: Vec<String> = self.named.iter().map(line).collect();
        if self.unnamed > 0 {
            lines.push(format!("{} more were left out", self.unnamed));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_named_up_to_a_bound() {
        let mut left_out = LeftOut::default();
        assert!(!left_out.is_something() && left_out.lines().is_empty());
        for number in 0..MOST_NAMED + 3 {
            left_out.add(Path::new(&format!("dev/{number}")), "a device");
        }
        let lines = left_out.lines();
        assert_eq!(lines.first().unwrap(), "dev/0 is a device and was left out");
        assert_eq!((lines.len(), lines.last().unwrap().as_str()), (MOST_NAMED + 1, "3 more were left out"));
    }
}
