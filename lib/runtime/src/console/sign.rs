//! What a Linux kernel says on its console when it stops, for a VMM that does not tell.

use tokio::sync::watch;

/// How the kernel stopped, by its own account. A guest may say anything, and harms nobody but itself by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    Panicked,
    Restarting,
    /// It has stopped for good, and its machine runs on: the firmware cannot switch it off.
    Halted,
}

/// From kernel/panic.c and kernel/reboot.c.
const SIGNS: [(&str, Sign); 3] = [
    ("Kernel panic - not syncing", Sign::Panicked),
    ("reboot: Restarting system", Sign::Restarting),
    ("System halted", Sign::Halted),
];
/// What is kept of an unfinished line: longer than a time stamp and any of the above.
const LINE: usize = 256;

/// Looks for signs in a console as it is read.
pub(super) struct Reader {
    line: Vec<u8>,
    found: watch::Sender<Option<Sign>>,
}

impl Reader {
    pub(super) fn new() -> (Self, watch::Receiver<Option<Sign>>) {
        let (found, receiver) = watch::channel(None);
        (Self { line: Vec::new(), found }, receiver)
    }

    pub(super) fn read(&mut self, data: &[u8]) {
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE.saturating_sub(self.line.len());
            self.line.extend(part.iter().take(room));
            if part.ends_with(b"\n") {
                if let Some(sign) = sign(&self.line) {
                    self.found.send_if_modified(|last| match last {
                        // A kernel that panics may restart next, which is the lesser news.
                        Some(Sign::Panicked) => false,
                        Some(Sign::Restarting | Sign::Halted) | None => last.replace(sign) != Some(sign),
                    });
                }
                self.line.clear();
            }
        }
    }
}

/// Kernel messages begin with their time; what programs write does not, unless they mean to.
fn sign(line: &[u8]) -> Option<Sign> {
    let line = String::from_utf8_lossy(line);
    let (time, text) = line.trim_start().strip_prefix('[')?.split_once("] ")?;
    let is_time = time.trim_start().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let (_, sign) = SIGNS.iter().find(|(words, _)| text.contains(words))?;
    is_time.then_some(*sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signs(pieces: &[&str]) -> Option<Sign> {
        let (mut reader, found) = Reader::new();
        for piece in pieces {
            reader.read(piece.as_bytes());
        }
        *found.borrow()
    }

    #[test]
    fn the_kernel_s_last_words_are_found_however_they_are_cut() {
        let panic = "\r\n[    3.141592] Kernel panic - not syncing: Attempted to kill init!\r\n";
        assert_eq!(signs(&[panic]), Some(Sign::Panicked));
        for cut in 0..panic.len() {
            assert_eq!(signs(&[&panic[..cut], &panic[cut..]]), Some(Sign::Panicked), "{cut}");
        }
        assert_eq!(signs(&["[   12.5] reboot: Restarting system\n"]), Some(Sign::Restarting));
        let halted = "[1234.567890] reboot: Power off not available: System halted instead\n";
        assert_eq!(signs(&[halted]), Some(Sign::Halted));
        assert_eq!(signs(&[panic, "[    3.2] reboot: Restarting system\n"]), Some(Sign::Panicked));
    }

    #[test]
    fn what_programs_say_is_no_sign_and_a_line_without_end_takes_no_memory() {
        assert_eq!(signs(&["the documentation says: System halted\n", "[ok] System halted\n"]), None);
        let (mut reader, found) = Reader::new();
        for _ in 0..1000 {
            reader.read(&[b'x'; 4096]);
        }
        assert!(reader.line.len() <= LINE);
        reader.read(b"\n[ 1.0] reboot: System halted\n");
        assert_eq!(*found.borrow(), Some(Sign::Halted));
    }
}
