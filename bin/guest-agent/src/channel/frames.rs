//! Tells a host's greeting from content that looks like one, by where the frames of HTTP/2 begin.
//!
//! A host that hangs up and comes back unseen greets in the middle of whatever frame it had begun; content may hold
//! anything, a greeting too. Both come in reads of the port, and a greeting always is a read by itself:
//!
//! ```text
//! the read, taken as bytes of frames, …
//!   begins a frame that cannot be   ─► a greeting: its text has no byte that a frame's length begins with
//!   ends a frame                    ─► content; were it a greeting after all, the next one would begin a frame
//!   leaves the frame unfinished     ─► held back; if another greeting comes next, it is one, else it was content
//! ```
//!
//! The last rule rests on how hosts write: a frame is written in pieces of many kilobytes, of which only the last, which
//! ends the frame, may be as short as a greeting. Two short reads in a row inside one frame are two hosts.

use imp_protocol::connection::LONGEST_FRAME;
use imp_protocol::hello;

/// What a host's side of HTTP/2 begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes before a frame's payload; the first three are the payload's length.
const HEADER: usize = 9;

/// What a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Bytes of this conversation; what was held back comes before them.
    Content,
    /// It may be either: the next read decides.
    Held,
    /// The beginning of another conversation; what was held back is nothing.
    Greeting,
}

/// Follows the bytes of one conversation.
#[derive(Debug, Clone, Default)]
pub(super) struct Frames {
    place: Place,
    holding: bool,
}

#[derive(Debug, Clone, Copy)]
enum Place {
    /// So many bytes of the preface have come. Before it there may be noise.
    Preface { seen: usize },
    /// So many bytes of a header have come.
    Header { seen: usize, length: usize },
    /// So many bytes of a payload have not.
    Payload { left: usize },
    /// A frame that cannot be.
    Broken,
}

impl Default for Place {
    fn default() -> Self {
        Self::Preface { seen: 0 }
    }
}

impl Frames {
    /// `read`: all that one read of the port gave.
    pub(super) fn judge(&mut self, read: &[u8]) -> Verdict {
        let after = self.place.after(read);
        let verdict = if !hello::is_greeting(read) {
            Verdict::Content
        } else {
            match after {
                Place::Preface { .. } | Place::Broken => Verdict::Greeting,
                Place::Header { seen: 0, .. } => Verdict::Content,
                Place::Header { .. } | Place::Payload { .. } if self.holding => Verdict::Greeting,
                Place::Header { .. } | Place::Payload { .. } => Verdict::Held,
            }
        };
        self.holding = verdict == Verdict::Held;
        self.place = after;
        verdict
    }
}

impl Place {
    fn after(mut self, mut bytes: &[u8]) -> Self {
        while let Some((first, rest)) = bytes.split_first() {
            (self, bytes) = match self {
                Self::Preface { seen } => (Self::preface(seen, *first), rest),
                Self::Header { seen, length } => {
                    let length = if seen < 3 { length << 8 | usize::from(*first) } else { length };
                    (Self::header(seen + 1, length), rest)
                }
                Self::Payload { left } => {
                    let count = left.min(bytes.len());
                    (Self::payload(left - count), bytes.get(count..).unwrap_or_default())
                }
                Self::Broken => return self,
            };
        }
        self
    }

    fn preface(seen: usize, byte: u8) -> Self {
        let seen = match PREFACE.get(seen) {
            Some(expected) if *expected == byte => seen + 1,
            _ => usize::from(PREFACE.first() == Some(&byte)),
        };
        if seen == PREFACE.len() { Self::payload(0) } else { Self::Preface { seen } }
    }

    fn header(seen: usize, length: usize) -> Self {
        // Known from the bytes so far: the rest can only make it longer.
        let least = length << (8 * 3_usize.saturating_sub(seen));
        match seen {
            _ if least > LONGEST_FRAME => Self::Broken,
            HEADER => Self::payload(length),
            _ => Self::Header { seen, length },
        }
    }

    fn payload(left: usize) -> Self {
        if left == 0 { Self::Header { seen: 0, length: 0 } } else { Self::Payload { left } }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting(nonce: u64) -> Vec<u8> {
        format!("\nIMP-HOST 1 1 {nonce:016x}\n").into_bytes()
    }

    fn frame(payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[0, 0, 0, 0, 0, 1], payload].concat()
    }

    /// Content as a hostile client would choose it: noise and greetings.
    fn payload() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            3 => any::<u64>().prop_map(greeting),
            1 => prop::collection::vec(any::<u8>(), 0..40),
            1 => (0_usize..9000).prop_map(|count| vec![b'x'; count]),
        ];
        prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
    }

    fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(payload().prop_map(|payload| frame(&payload)), 1..6)
    }

    /// Reads of what hosts write: pages, and shorter where a frame was cut or ends. `cut`: where a frame is cut, at most
    /// once, as sockets cut only what is much longer.
    fn reads(frame: &[u8], cut: usize) -> Vec<&[u8]> {
        let (first, second) = frame.split_at(cut % (frame.len() + 1));
        first.chunks(4096).chain(second.chunks(4096)).collect()
    }

    fn opened() -> Frames {
        let mut frames = Frames::default();
        assert_eq!(frames.judge(PREFACE), Verdict::Content);
        frames
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn no_content_is_a_greeting(sent in frames(), cuts in prop::collection::vec(any::<usize>(), 6)) {
            let mut frames = opened();
            for (frame, cut) in sent.iter().zip(cuts) {
                let mut last = Verdict::Content;
                for read in reads(frame, cut) {
                    last = frames.judge(read);
                    prop_assert_ne!(last, Verdict::Greeting);
                }
                // A frame that has ended is never held back.
                prop_assert_eq!(last, Verdict::Content);
            }
        }

        #[test]
        fn no_cut_that_ends_at_a_greeting_in_a_frame_makes_one(before in payload(), nonce: u64, behind in payload()) {
            let text = greeting(nonce);
            let sent = frame(&[&before[..], &text, &behind].concat());
            let start = 9 + before.len();
            let mut frames = opened();
            for read in sent[..start].chunks(4096) {
                prop_assert_ne!(frames.judge(read), Verdict::Greeting);
            }
            let verdict = frames.judge(&text);
            prop_assert_eq!(verdict, if behind.is_empty() { Verdict::Content } else { Verdict::Held });
            for read in sent[start + text.len()..].chunks(4096) {
                // Were all that is left another greeting, it would end the frame.
                prop_assert_eq!(frames.judge(read), Verdict::Content);
            }
            prop_assert_eq!(frames.judge(&frame(b"next")), Verdict::Content);
        }

        #[test]
        fn a_host_that_comes_back_is_heard_wherever_the_one_before_hung_up(
            sent in frames(),
            hang_up: usize,
            nonces: [u64; 3],
        ) {
            let sent = [PREFACE, &sent.concat()].concat();
            let (sent, _) = sent.split_at(hang_up % (sent.len() + 1));
            let mut frames = Frames::default();
            for read in sent.chunks(4096) {
                // Cut at pages alone, no read here is as short as a greeting but the last.
                if read.len() == 4096 {
                    prop_assert_eq!(frames.judge(read), Verdict::Content);
                } else {
                    frames.judge(read);
                }
            }
            // The first may be held back, and the second may end the frame to the byte; the third begins one.
            let heard = nonces.map(|nonce| frames.judge(&greeting(nonce)) == Verdict::Greeting);
            prop_assert!(heard.contains(&true), "{heard:?}");
        }

        #[test]
        fn any_bytes_are_followed(reads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..32)) {
            let mut frames = Frames::default();
            for read in reads {
                prop_assert_eq!(frames.judge(&read), Verdict::Content);
            }
        }
    }

    #[test]
    fn between_frames_the_first_greeting_is_heard() {
        assert_eq!(Frames::default().judge(&greeting(1)), Verdict::Greeting);
        assert_eq!(opened().judge(&greeting(1)), Verdict::Greeting);
        let mut frames = opened();
        assert_eq!(frames.judge(&frame(b"whole")), Verdict::Content);
        assert_eq!(frames.judge(&greeting(1)), Verdict::Greeting);
    }

    #[test]
    fn noise_and_a_greeting_come_before_the_preface() {
        let mut frames = Frames::default();
        let opening = [&b"noise, PRI * HT"[..], &greeting(1), PREFACE, &frame(b"whole")].concat();
        assert_eq!(frames.judge(&opening), Verdict::Content);
        let Place::Header { seen: 0, .. } = frames.place else { panic!("{:?}", frames.place) };
    }

    #[test]
    fn a_frame_of_the_greatest_length_is_one_and_a_longer_one_is_not() {
        let header = |length: usize| {
            let [.., a, b, c] = length.to_be_bytes();
            [a, b, c, 0, 0, 0, 0, 0, 1]
        };
        for (length, is_one) in [(LONGEST_FRAME, true), (LONGEST_FRAME + 1, false)] {
            let mut frames = opened();
            frames.judge(&header(length));
            assert_eq!(matches!(frames.place, Place::Payload { left } if left == length), is_one);
            assert_eq!(matches!(frames.place, Place::Broken), !is_one);
        }
    }
}
