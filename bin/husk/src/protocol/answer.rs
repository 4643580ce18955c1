//! Answers: one shape for all requests, with the fields that each has something to say in.

use std::path::PathBuf;
use std::time::Duration;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// One line of JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Answer {
    pub(crate) ok: bool,
    /// From the last byte of the request to the answer.
    #[serde(serialize_with = "milliseconds")]
    pub(crate) latency_ms: Duration,
    /// Why not, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<Code>,
    /// Why not, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip_serializing_if = "Stages::is_empty")]
    pub(crate) stages: Stages,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) already_active: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    #[serde(flatten)]
    pub(crate) facts: Option<Facts>,
}

/// What a status says, and the answer to what made a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Facts {
    pub(crate) state: &'static str,
    /// Process id of the husk.
    pub(crate) pid: u32,
    pub(crate) vm_id: String,
    /// The engine's own id of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vmm_pid: Option<u32>,
    /// Digest of what the machine was made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) snapshot: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) holds_secrets: bool,
    /// Snapshots for forks that have not been removed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) forks: Vec<String>,
    /// How the machine ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<imp_runtime::status::Outcome>,
}

/// Why a request was refused, or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Code {
    /// The line is not what it should be.
    Malformed,
    TooLong,
    UnknownOp,
    /// It asks for what this husk cannot do.
    Unsupported,
    /// It took too long.
    Deadline,
    NotPrepared,
    AlreadyPrepared,
    AlreadyActive,
    OtherSnapshot,
    /// The request was meant for another husk.
    OtherMachine,
    NotActive,
    Busy,
    /// The machine has ended.
    Ended,
    /// The husk is ending.
    Ending,
    /// There is no such snapshot here.
    NoSnapshot,
    /// The snapshot is not the expected one, is damaged, or does not fit this machine.
    SnapshotRefused,
    /// The machine's network does not keep what was asked for.
    Network,
    HoldsSecrets,
    /// The guest did not confirm that it is a machine of its own, and was ended.
    NotConfirmed,
    ForkExists,
    NoFork,
    /// Another user's.
    Stranger,
    TooMany,
    /// It was tried, and failed.
    Failed,
}

/// How long each step took, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stages(Vec<(String, Duration)>);

impl Stages {
    pub(crate) fn push(&mut self, name: impl Into<String>, took: Duration) {
        self.0.push((name.into(), took));
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Answer {
    pub(crate) fn good() -> Self {
        Self { ok: true, ..Self::default() }
    }

    pub(crate) fn refusal(code: Code, error: String) -> Self {
        let already_active = code == Code::AlreadyActive;
        Self { code: Some(code), error: Some(error), already_active, ..Self::default() }
    }

    pub(crate) fn line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("an answer has no map whose keys are not text");
        line.push(b'\n');
        line
    }
}

impl Serialize for Stages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, took) in &self.0 {
            map.serialize_entry(name, &rounded(*took))?;
        }
        map.end()
    }
}

fn milliseconds<S: Serializer>(took: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(rounded(*took))
}

/// Milliseconds, to the microsecond.
fn rounded(took: Duration) -> f64 {
    took.as_micros() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_one_line_with_what_it_has_to_say() {
        let mut good = Answer { latency_ms: Duration::from_micros(23_800), ..Answer::good() };
        good.stages.push("resume", Duration::from_micros(1_500));
        assert_eq!(good.line(), b"{\"ok\":true,\"latency_ms\":23.8,\"stages\":{\"resume\":1.5}}\n");
        let again = Answer::refusal(Code::AlreadyActive, "two\nlines".to_owned());
        let line = String::from_utf8(again.line()).unwrap();
        assert_eq!(line.matches('\n').count(), 1);
        assert!(
            line.contains("\"already_active\":true") && line.contains("\"code\":\"already-active\""),
            "{line}"
        );
    }
}
