//! One budget's line: what was measured, what it is compared with, and whether the budget is kept.

use std::fmt;
use std::time::Duration;

pub(crate) const HEADER: &str =
    "budget                                            ours        floor    ratio    limit  verdict";

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Quantity {
    Time(Duration),
    Bytes(u64),
}

impl Quantity {
    fn number(self) -> f64 {
        match self {
            Self::Time(time) => time.as_secs_f64(),
            Self::Bytes(bytes) => bytes as f64,
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Time(time) if time.as_millis() >= 10 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
            Self::Time(time) => format!("{:.3} ms", time.as_secs_f64() * 1e3),
            Self::Bytes(bytes) => format!("{:.2} MiB", *bytes as f64 / f64::from(1 << 20)),
        };
        f.pad(&text)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// Ours divided by the floor.
    AtMostTimes {
        floor: Quantity,
        ratio: f64,
    },
    AtMost(Quantity),
    /// Shown beside its floor, and not judged.
    Shown {
        floor: Quantity,
    },
}

/// A measured budget.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) ours: Quantity,
    pub(crate) limit: Limit,
}

impl Line {
    fn ratio(&self) -> f64 {
        match self.limit {
            Limit::AtMostTimes { floor, .. } | Limit::Shown { floor } => self.ours.number() / floor.number(),
            Limit::AtMost(limit) => self.ours.number() / limit.number(),
        }
    }

    pub(crate) fn is_kept(&self) -> bool {
        match self.limit {
            Limit::AtMostTimes { ratio, .. } => self.ratio() <= ratio,
            Limit::AtMost(_) => self.ratio() <= 1.0,
            Limit::Shown { .. } => true,
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (floor, limit) = match self.limit {
            Limit::AtMostTimes { floor, ratio } => (floor.to_string(), format!("{ratio:.2}x")),
            Limit::AtMost(limit) => ("-".to_owned(), limit.to_string()),
            Limit::Shown { floor } => (floor.to_string(), "-".to_owned()),
        };
        let verdict = match self.limit {
            Limit::Shown { .. } => "-",
            _ if self.is_kept() => "ok",
            _ => "MISS",
        };
        let (ours, ratio) = (self.ours.to_string(), format!("{:.2}x", self.ratio()));
        write!(f, "{:<42} {ours:>11} {floor:>12} {ratio:>8} {limit:>8}  {verdict}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(ours: u64, floor: u64, ratio: f64) -> Line {
        let time = |milliseconds| Quantity::Time(Duration::from_millis(milliseconds));
        Line { name: "x", ours: time(ours), limit: Limit::AtMostTimes { floor: time(floor), ratio } }
    }

    #[test]
    fn a_ratio_above_its_limit_is_a_miss() {
        assert!(line(20, 10, 2.0).is_kept());
        assert!(!line(21, 10, 2.0).is_kept());
        assert!(line(21, 10, 2.0).to_string().ends_with("MISS"));
    }

    #[test]
    fn what_has_no_limit_is_shown_with_its_ratio_and_misses_nothing() {
        let floor = Quantity::Time(Duration::from_millis(10));
        let shown = Line { limit: Limit::Shown { floor }, ..line(30, 1, 1.0) };
        assert!(shown.is_kept());
        let text = shown.to_string();
        assert!(text.contains("3.00x") && text.ends_with(" -"), "{text}");
    }

    #[test]
    fn a_size_above_its_limit_is_a_miss() {
        let size =
            |ours| Line { name: "x", ours: Quantity::Bytes(ours), limit: Limit::AtMost(Quantity::Bytes(10)) };
        assert!(size(10).is_kept());
        assert!(!size(11).is_kept());
    }
}
