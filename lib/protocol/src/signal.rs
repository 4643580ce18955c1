//! Names and numbers of signals, as users and images write them.

/// First and last of the real-time signals, as C libraries number them: two below belong to the library itself.
const REAL_TIME: (i32, i32) = (34, 64);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no signal; use a name such as SIGTERM or TERM, RTMIN+3, or a number from 1 to 64")]
pub struct Unknown(String);

/// As the kernel numbers them on x86-64 and aarch64.
const NAMES: [(&str, i32); 34] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// Parses "SIGTERM", "term", "15", "SIGRTMIN+3" or "RTMAX-1".
pub fn number(text: &str) -> Result<i32, Unknown> {
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let number = named(name).or_else(|| real_time(name)).or_else(|| name.parse().ok());
    number.filter(|number| (1..=REAL_TIME.1).contains(number)).ok_or_else(|| Unknown(text.to_owned()))
}

fn named(name: &str) -> Option<i32> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

fn real_time(name: &str) -> Option<i32> {
    let (first, last) = REAL_TIME;
    let offset = |text: &str, sign| {
        if text.is_empty() { Some(0) } else { text.strip_prefix(sign)?.parse::<u16>().ok().map(i32::from) }
    };
    let number = if let Some(rest) = name.strip_prefix("RTMIN") {
        first + offset(rest, '+')?
    } else {
        last - offset(name.strip_prefix("RTMAX")?, '-')?
    };
    (first..=last).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_signals_are_understood() {
        for (text, expected) in [
            ("SIGTERM", 15),
            ("kill", 9),
            ("1", 1),
            ("SIGRTMIN+3", 37),
            ("RTMIN", 34),
            ("RTMAX-1", 63),
            ("64", 64),
        ] {
            assert_eq!(number(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_signal_is_refused() {
        for text in ["", "0", "65", "-9", "SIGSIG", "RTMIN+31", "RTMAX+1", "RTMIN+x", "RTMIN+99999999999"] {
            assert!(number(text).is_err(), "{text}");
        }
    }
}
