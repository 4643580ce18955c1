//! Counts the tries of one request and pauses between them.

use super::error::Error;
use super::retry::{self, Verdict};
use super::settings::RegistrySettings;
use crate::progress::{Event, Progress};

/// Tries at a server that is not the last resort: waiting for a broken mirror helps nobody.
const TRIES_AT_A_MIRROR: u32 = 2;

/// What follows if a server does not give what it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resort {
    /// Another server is asked.
    Another,
    /// Nothing: this is the only one, or the last.
    Last,
}

pub(crate) struct Attempts<'a> {
    settings: &'a RegistrySettings,
    resort: Resort,
    what: String,
    progress: &'a dyn Progress,
    made: u32,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(
        settings: &'a RegistrySettings,
        resort: Resort,
        what: String,
        progress: &'a dyn Progress,
    ) -> Self {
        Self { settings, resort, what, progress, made: 0 }
    }

    /// The last try got so far that the ones before it no longer count.
    pub(crate) fn count_anew(&mut self) {
        self.made = 0;
    }

    /// Pauses if the request is worth another try; else gives the error back.
    pub(crate) async fn failed(&mut self, error: Error) -> Result<(), Error> {
        self.made = self.made.saturating_add(1);
        if self.resort == Resort::Another && self.made >= TRIES_AT_A_MIRROR {
            return Err(error);
        }
        match retry::after(error.failure(), self.made, fastrand::f64(), self.settings) {
            Verdict::GiveUp => Err(error),
            Verdict::Again { pause } => {
                let (what, attempt) = (self.what.clone(), self.made);
                tracing::debug!(what, attempt, ?pause, %error, "a request is tried again");
                self.progress.report(Event::Retrying { what, attempt, pause, reason: error.to_string() });
                tokio::time::sleep(pause).await;
                Ok(())
            }
        }
    }
}
