//! How long each stage of a run took.

use std::time::{Duration, Instant};

use crate::output;

/// Stages of this command, in order; those of the VM are in its status.
pub(super) struct Timings {
    start: Instant,
    stages: Vec<(&'static str, Duration)>,
}

impl Timings {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), stages: Vec::new() }
    }

    /// Ends a stage.
    pub(super) fn stage(&mut self, name: &'static str) {
        self.stages.push((name, self.start.elapsed()));
    }

    pub(super) fn print(&self) {
        for (name, at) in &self.stages {
            output::say(&format!("{:>9.1} ms  {name}", at.as_secs_f64() * 1000.0));
        }
    }
}
