//! The user's terminal: raw while a program in a guest has it, and always as it was afterwards.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use imp_protocol::process::Size;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr,
};

/// What no key sends, in the place of a special one.
const NO_KEY: u8 = 0;
/// What the key of this name sends.
const DELETE: u8 = 0x7f;

/// Raw mode of stdin; ends with this value, and also when the program panics.
pub(crate) struct RawMode {
    before: Arc<Termios>,
}

impl RawMode {
    /// While the program has not started, keys that mean a signal mean it to this command; all else is kept for the
    /// program.
    pub(crate) fn enter() -> io::Result<Self> {
        let stdin = io::stdin();
        let before = Arc::new(tcgetattr(&stdin)?);
        let mut raw = Termios::clone(&before);
        raw.make_raw();
        raw.local_modes.insert(LocalModes::ISIG);
        // A command that is stopped would leave the terminal like this.
        raw.special_codes[SpecialCodeIndex::VSUSP] = NO_KEY;
        let for_panic = before.clone();
        let hook = std::panic::take_hook();
        // A release build aborts on a panic: nothing is dropped then.
        std::panic::set_hook(Box::new(move |panic| {
            restore(&for_panic);
            hook(panic);
        }));
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }

    /// All keys are the program's.
    pub(crate) fn give_to_program(&self) -> io::Result<()> {
        let mut raw = Termios::clone(&self.before);
        raw.make_raw();
        Ok(tcsetattr(io::stdin(), OptionalActions::Now, &raw)?)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore(&self.before);
    }
}

fn restore(before: &Termios) {
    // A terminal that is gone needs no restoring.
    let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
}

pub(crate) fn is_terminal(stream: impl AsFd) -> bool {
    isatty(stream)
}

/// Size of the terminal that the user looks at; none: there is none.
pub(crate) fn size() -> Option<Size> {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    Some(Size { rows: size.ws_row, columns: size.ws_col, term: std::env::var("TERM").unwrap_or_default() })
}

/// Keys that let go of a program without ending it: at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetachKeys(Vec<u8>);

#[derive(Debug, thiserror::Error)]
#[error(
    "write keys with commas between, each one printable ASCII character other than a comma, DEL, or ctrl- with a letter or one of @ [ \\ ] ^ _, as in ctrl-p,ctrl-q"
)]
pub(crate) struct NotKeys;

impl std::str::FromStr for DetachKeys {
    type Err = NotKeys;

    fn from_str(text: &str) -> Result<Self, NotKeys> {
        text.split(',').map(key).collect::<Option<Vec<u8>>>().map(Self).ok_or(NotKeys)
    }
}

/// As docker reads it; after `ctrl-` capitals are taken too.
fn key(text: &str) -> Option<u8> {
    let byte = |text: &str| match text.as_bytes() {
        [byte @ b' '..=b'~'] => Some(*byte),
        _ => None,
    };
    if text == "DEL" {
        return Some(DELETE);
    }
    let Some(letter) = text.strip_prefix("ctrl-") else { return byte(text) };
    match byte(letter)?.to_ascii_uppercase() {
        letter @ b'@'..=b'_' => Some(letter - b'@'),
        _ => None,
    }
}

/// Looks for the keys in what is typed. Keys that turn out to be no detachment are passed on late, not lost.
#[derive(Debug)]
pub(crate) struct DetachFilter {
    keys: DetachKeys,
    /// How many of the keys have been typed in a row.
    matched: usize,
}

/// What is to become of typed bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    Pass(Vec<u8>),
    /// The keys were typed; these bytes came before them.
    Detach(Vec<u8>),
}

impl DetachFilter {
    pub(crate) fn new(keys: DetachKeys) -> Self {
        Self { keys, matched: 0 }
    }

    pub(crate) fn typed(&mut self, bytes: &[u8]) -> Typed {
        let keys = &self.keys.0;
        let mut pass = Vec::with_capacity(bytes.len() + self.matched);
        for &byte in bytes {
            if keys.get(self.matched) == Some(&byte) {
                self.matched += 1;
                if self.matched == keys.len() {
                    self.matched = 0;
                    return Typed::Detach(pass);
                }
                continue;
            }
            pass.extend(keys.iter().take(self.matched));
            self.matched = usize::from(keys.len() > 1 && keys.first() == Some(&byte));
            if self.matched == 0 {
                pass.push(byte);
            }
        }
        Typed::Pass(pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(keys: &str) -> DetachFilter {
        DetachFilter::new(keys.parse().unwrap())
    }

    #[test]
    fn the_keys_detach_also_when_they_come_apart() {
        let mut filter = filter("ctrl-p,ctrl-q");
        assert_eq!(filter.typed(b"ab\x10"), Typed::Pass(b"ab".to_vec()));
        assert_eq!(filter.typed(b"\x11cd"), Typed::Detach(Vec::new()));
    }

    #[test]
    fn keys_that_are_no_detachment_are_not_lost() {
        let mut filter = filter("ctrl-p,ctrl-q");
        assert_eq!(filter.typed(b"\x10"), Typed::Pass(Vec::new()));
        assert_eq!(filter.typed(b"x"), Typed::Pass(b"\x10x".to_vec()));
        assert_eq!(filter.typed(b"\x10\x10\x11"), Typed::Detach(b"\x10".to_vec()));
    }

    #[test]
    fn one_key_is_enough() {
        for (key, typed) in
            [("ctrl-]", b"a\x1d"), ("ctrl-Q", b"a\x11"), ("DEL", b"a\x7f"), (" ", b"a "), ("-", b"a-")]
        {
            assert_eq!(filter(key).typed(typed), Typed::Detach(b"a".to_vec()), "{key}");
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for bad in ["", "ctrl-", "ctrl-aa", "ab", "ctrl-1", ",", "a,", "ctrl-p,,ctrl-q", "\u{e9}", "\n"] {
            assert!(bad.parse::<DetachKeys>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_typed_is_passed_on_in_order_but_for_the_keys() {
        use proptest::prelude::*;
        proptest!(|(chunks in prop::collection::vec(prop::collection::vec(0x0f_u8..0x12, 0..5), 0..5))| {
            let mut filter = filter("ctrl-p,ctrl-q");
            let all: Vec<u8> = chunks.concat();
            let mut passed = Vec::new();
            let mut detached = false;
            for chunk in &chunks {
                match filter.typed(chunk) {
                    Typed::Pass(bytes) => passed.extend(bytes),
                    Typed::Detach(bytes) => { passed.extend(bytes); detached = true; break; }
                }
            }
            let keys = all.windows(2).position(|pair| pair == [0x10, 0x11]);
            prop_assert_eq!(detached, keys.is_some());
            match keys {
                Some(position) => prop_assert_eq!(&passed, &all[..position]),
                None => prop_assert!(all.starts_with(&passed) && all.len() - passed.len() <= 1),
            }
        });
    }
}
