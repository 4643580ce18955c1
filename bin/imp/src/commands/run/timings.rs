//! How long each stage of a run took, of this command and of the VM.

use std::time::{Duration, Instant};

use imp_runtime::status::{Stage, StageName};

/// Ends of stages since the command began, in order.
pub(super) struct Timings {
    start: Instant,
    stages: Vec<(&'static str, Duration)>,
}

impl Timings {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), stages: Vec::new() }
    }

    /// Ends a stage now.
    pub(super) fn stage(&mut self, name: &'static str) {
        self.stages.push((name, self.start.elapsed()));
    }

    /// A stage that ended at that time.
    pub(super) fn stage_at(&mut self, name: &'static str, at: Instant) {
        self.stages.push((name, at.duration_since(self.start)));
    }

    /// Stages of a VM that was told to start at `start`.
    pub(super) fn vm_stages(&mut self, start: Instant, stages: &[Stage]) {
        let start = start.duration_since(self.start);
        self.stages.extend(
            stages.iter().map(|stage| (words(stage.name), start + Duration::from_millis(stage.milliseconds))),
        );
    }

    /// One line for each stage: when it ended, how long it took, what it was.
    pub(super) fn table(&self) -> String {
        let milliseconds = |span: Duration| span.as_secs_f64() * 1000.0;
        let mut before = Duration::ZERO;
        let mut text = String::new();
        for (name, at) in &self.stages {
            let took = at.saturating_sub(before);
            before = *at;
            text.push_str(&format!("{:>9.1} ms {:>+9.1}  {name}\n", milliseconds(*at), milliseconds(took)));
        }
        text
    }
}

fn words(stage: StageName) -> &'static str {
    match stage {
        StageName::Prepared => "disks and network prepared",
        StageName::Spawned => "VMM spawned",
        StageName::Answered => "agent answered",
        StageName::Configured => "guest configured",
        StageName::MountsCopied => "directories copied in",
        StageName::Initialised => "set up",
        StageName::Loaded => "snapshot loaded",
        StageName::Woken => "guest woken",
        StageName::MainStarted => "program started",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_the_vm_stand_among_those_of_the_command() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut timings = Timings { start, stages: Vec::new() };
        timings.stage_at("image", after(2));
        timings.vm_stages(after(5), &[Stage { name: StageName::Spawned, milliseconds: 10 }]);
        timings.stage_at("first byte", after(40));
        let expected = "      2.0 ms      +2.0  image\n     15.0 ms     +13.0  VMM spawned\n     40.0 ms     +25.0  first byte\n";
        assert_eq!(timings.table(), expected);
    }
}
