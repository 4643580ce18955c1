//! Lines of a bounded length, out of bytes as they come.

/// Bytes of the longest line, without its end.
pub(crate) const LONGEST: usize = 1 << 20;

/// Bytes that have come and are no whole line yet.
#[derive(Default)]
pub(crate) struct Lines {
    bytes: Vec<u8>,
    /// So many of them are known to hold no end of a line.
    searched: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the line is longer than {LONGEST} bytes")]
pub(crate) struct TooLong;

impl Lines {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, without its end. After an error nothing that comes makes sense any more.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        let unsearched = self.bytes.get(self.searched..).unwrap_or_default();
        let Some(end) = unsearched.iter().position(|byte| *byte == b'\n').map(|end| self.searched + end)
        else {
            self.searched = self.bytes.len();
            return if self.searched > LONGEST { Err(TooLong) } else { Ok(None) };
        };
        if end > LONGEST {
            return Err(TooLong);
        }
        let rest = self.bytes.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.bytes, rest);
        self.searched = 0;
        line.truncate(end);
        Ok(Some(line))
    }

    /// Whether a line has begun.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(lines: &mut Lines) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| lines.next().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn lines_are_the_same_however_they_come(
            text in proptest::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..200),
            cuts in proptest::collection::vec(1..20usize, 1..50),
        ) {
            let mut expected: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            let rest = expected.pop().unwrap();
            let (mut lines, mut came, mut left) = (Lines::default(), Vec::new(), text.as_slice());
            for cut in cuts.iter().cycle() {
                let (now, later) = left.split_at((*cut).min(left.len()));
                lines.push(now);
                came.extend(all(&mut lines));
                left = later;
                if left.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(came, expected);
            prop_assert_eq!(lines.bytes, rest);
        }
    }

    #[test]
    fn a_line_is_as_long_as_allowed_and_no_longer_whether_or_not_it_ends() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; LONGEST]);
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"\nrest");
        assert_eq!(lines.next().unwrap().map(|line| line.len()), Some(LONGEST));
        assert!(!lines.is_empty());
        for end in ["", "\n"] {
            let mut lines = Lines::default();
            lines.push(&vec![b'x'; LONGEST + 1]);
            lines.push(end.as_bytes());
            assert_eq!(lines.next(), Err(TooLong), "{end:?}");
        }
    }
}
