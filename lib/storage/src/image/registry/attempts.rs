//! Counts the tries of one request and pauses between them.

use super::error::Error;
use super::retry::{self, Verdict};
use super::settings::RegistrySettings;
use crate::progress::{Event, Progress};

pub(super) struct Attempts<'a> {
    settings: &'a RegistrySettings,
    what: String,
    progress: &'a dyn Progress,
    made: u32,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(settings: &'a RegistrySettings, what: String, progress: &'a dyn Progress) -> Self {
        Self { settings, what, progress, made: 0 }
    }

    /// The last try got so far that the ones before it no longer count.
    pub(super) fn count_anew(&mut self) {
        self.made = 0;
    }

    /// Pauses if the request is worth another try; else gives the error back.
    pub(super) async fn failed(&mut self, error: Error) -> Result<(), Error> {
        self.made = self.made.saturating_add(1);
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
