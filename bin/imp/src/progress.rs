//! Progress of pulls, imports and builds: bars on a terminal, plain lines elsewhere.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use imp_storage::blob::digest::Digest;
use imp_storage::progress::{Event, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;
use crate::value::show_bytes;

/// How much is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Bars if stderr is a terminal, else lines.
    Shown,
    Quiet,
}

/// What a user sees of a long operation.
pub(crate) enum Display {
    Bars(Bars),
    Lines,
    Quiet,
}

impl Display {
    pub(crate) fn new(detail: Detail) -> Self {
        Self::doing(detail, "downloading")
    }

    /// `what`: is done with what is transferred, as a bar says it.
    pub(crate) fn doing(detail: Detail, what: &'static str) -> Self {
        match detail {
            Detail::Quiet => Self::Quiet,
            Detail::Shown if crate::terminal::is_terminal(std::io::stderr()) => Self::Bars(Bars::new(what)),
            Detail::Shown => Self::Lines,
        }
    }
}

impl Progress for Display {
    fn report(&self, event: Event) {
        match self {
            Self::Bars(bars) => bars.show(&event),
            Self::Lines => {
                if let Some(line) = line(&event) {
                    output::say(&line);
                }
            }
            Self::Quiet => {}
        }
    }
}

/// The events that are worth a line in a log.
fn line(event: &Event) -> Option<String> {
    match event {
        Event::Resolving { name } => Some(format!("{name}: looking it up")),
        Event::Resolved { image, layers } => {
            let size = layers.iter().map(|(_, size)| size).sum();
            Some(format!("{}: {} layers, {}", image.short(), layers.len(), show_bytes(size)))
        }
        Event::Present { blob } => Some(format!("{}: already there", blob.short())),
        Event::Verified { blob } => Some(format!("{}: downloaded", blob.short())),
        Event::Waiting { digest } => Some(format!("{}: waiting for another imp", digest.short())),
        Event::Retrying { what, attempt, pause, reason } => {
            Some(format!("{what}: {reason}; try {attempt} in {:.1} s", pause.as_secs_f32()))
        }
        Event::Built { disk, bytes } => Some(format!("{}: disk built, {}", disk.short(), show_bytes(*bytes))),
        Event::Stored { image } => Some(format!("{}: ready", image.short())),
        Event::Transferred { .. } | Event::Building { .. } => None,
    }
}

pub(crate) struct Bars {
    all: MultiProgress,
    what: &'static str,
    of_digest: Mutex<HashMap<Digest, ProgressBar>>,
}

impl Bars {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            all: MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)),
            of_digest: Mutex::default(),
        }
    }

    fn show(&self, event: &Event) {
        match event {
            Event::Transferred { blob, bytes, total } => self.advance(blob, self.what, *bytes, *total),
            Event::Building { disk, bytes, total } => self.advance(disk, "building disk", *bytes, *total),
            Event::Verified { blob } => self.finish(blob),
            Event::Built { disk, .. } => self.finish(disk),
            Event::Retrying { .. } | Event::Waiting { .. } => {
                if let Some(line) = line(event) {
                    // Nobody to tell if the terminal is gone.
                    let _ = self.all.println(line);
                }
            }
            Event::Resolving { .. }
            | Event::Resolved { .. }
            | Event::Present { .. }
            | Event::Stored { .. } => {}
        }
    }

    fn advance(&self, digest: &Digest, what: &'static str, bytes: u64, total: u64) {
        let mut bars = self.of_digest.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = bars.entry(*digest).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(total));
            bar.set_style(style());
            bar.set_prefix(digest.short());
            bar.set_message(what);
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        bar.set_length(total);
        bar.set_position(bytes);
    }

    fn finish(&self, digest: &Digest) {
        let mut bars = self.of_digest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = bars.remove(digest) {
            bar.finish_and_clear();
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix} {msg:13} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec}")
        .expect("the template is well formed")
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_one_line_for_each_thing_done_and_none_for_bytes_on_the_way() {
        let digest = Digest::of(b"x");
        let name = digest.short();
        assert_eq!(name.len(), 12);
        assert_eq!(line(&Event::Verified { blob: digest }), Some(format!("{name}: downloaded")));
        let resolved = Event::Resolved { image: digest, layers: vec![(digest, 1 << 20)] };
        assert_eq!(line(&resolved), Some(format!("{name}: 1 layers, 1.0 MiB")));
        assert_eq!(line(&Event::Transferred { blob: digest, bytes: 1, total: 2 }), None);
    }
}
