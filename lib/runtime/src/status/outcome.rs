//! How a VM ended, and why it failed.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Fault;

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum Outcome {
    /// The main process exited.
    Exited { code: u8 },
    /// The main process was ended by a signal.
    Signalled { signal: u8, out_of_memory: bool, timed_out: bool },
    /// The main process could not be started; `code` is what a shell would say: 126 or 127.
    NotStarted { why: String, code: u8 },
    /// The VM was killed by its user before its main process had ended.
    Killed,
    /// The guest powered off by itself.
    PoweredOff,
    /// The VM did not come up, or broke: what went wrong, and the last lines of its console.
    Failed { failure: Failure, console: Vec<String> },
}

/// Half a sentence, with what its console says last where that tells more.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "its program ended with exit status {code}"),
            Self::Signalled { signal, out_of_memory, timed_out } => {
                write!(f, "its program was ended by signal {signal}")?;
                if *out_of_memory {
                    f.write_str(", because the guest ran out of memory")?;
                }
                if *timed_out {
                    f.write_str(", because its time was up")?;
                }
                Ok(())
            }
            Self::NotStarted { why, .. } => write!(f, "its program could not be started: {why}"),
            Self::Killed => f.write_str("it was killed"),
            Self::PoweredOff => f.write_str("its guest powered off"),
            Self::Failed { failure, console } => {
                write!(f, "{failure}")?;
                let last = console.iter().rev().find(|line| !line.trim().is_empty());
                match last.filter(|_| failure.is_on_console()) {
                    // A guest's words do not steer a terminal.
                    Some(line) => write!(f, ": \"{}\"", line.trim().escape_debug()),
                    None => Ok(()),
                }
            }
        }
    }
}

impl Outcome {
    /// Exit code for a shell: the program's own, 128 + signal, 125 for a VM that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited { code } | Self::NotStarted { code, .. } => *code,
            Self::Signalled { signal, .. } => signal.saturating_add(128),
            Self::Killed => 137,
            Self::PoweredOff => 0,
            Self::Failed { .. } => 125,
        }
    }
}

/// Why a VM failed; `detail` holds the causes, outermost first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Failure {
    #[error("whoever created it did not start it within {seconds} s")]
    NeverStarted { seconds: u64 },
    #[error("the machine could not be started: {detail}")]
    Spawn { detail: String },
    #[error("the machine ended while it booted ({vmm}); see the last lines of its console")]
    EndedInBoot { vmm: VmmEnd },
    #[error("the machine ended before anybody had it ({vmm}); see the last lines of its console")]
    EndedDormant { vmm: VmmEnd },
    #[error("{command:?} of its template failed ({outcome}): {output}")]
    Init { command: String, outcome: String, output: String },
    #[error("the guest did not answer within {seconds} s; see `imp logs --console`")]
    NoAnswer { seconds: u64 },
    #[error("the guest's processes could not be made to stand still")]
    NoSleep,
    #[error("the guest could not be set up: {detail}")]
    Setup { detail: String },
    #[error("the machine ended under the main process ({vmm}); see the last lines of its console")]
    EndedWhileRunning { vmm: VmmEnd },
    #[error("the channel to the guest broke and did not come back within {seconds} s")]
    ChannelLost { seconds: u64 },
    #[error(
        "the guest's agent died, and the main process with it; see `imp logs --console`, and run it again"
    )]
    MainLost,
    #[error("the process that owned the machine ended before the main process had started; run it again")]
    OwnerGone,
    #[error("the machine was gone when its owner came back; how its main process ended is not known")]
    GoneUnseen,
}

impl Failure {
    /// Whether the last lines of the console say more than this does.
    pub fn is_on_console(&self) -> bool {
        match self {
            Self::Spawn { .. }
            | Self::EndedInBoot { .. }
            | Self::EndedDormant { .. }
            | Self::NoAnswer { .. }
            | Self::EndedWhileRunning { .. }
            | Self::ChannelLost { .. } => true,
            // The machine worked, or nobody saw what it did.
            Self::NeverStarted { .. }
            | Self::Init { .. }
            | Self::NoSleep
            | Self::Setup { .. }
            | Self::MainLost
            | Self::OwnerGone
            | Self::GoneUnseen => false,
        }
    }
}

/// How a VMM process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "end", content = "value")]
pub enum VmmEnd {
    /// The guest powered off.
    PoweredOff,
    /// The guest restarted, which is what a kernel panic looks like.
    Reset,
    Exit(i32),
    /// It ended itself, and its exit status says why.
    Fault {
        status: i32,
        fault: Fault,
    },
    Signal(i32),
    /// The memory file of the snapshot that it went on from is shorter than its memory.
    MemoryCutShort,
    /// The kernel killed it, because the VM needed more memory than its control group lets it have.
    OutOfMemory {
        limit_bytes: u64,
    },
    /// It was not a child of this process, so only its end is known.
    Unknown,
}

impl fmt::Display for VmmEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest's kernel panicked or restarted"),
            Self::Exit(code) => write!(f, "exit status {code}"),
            Self::Fault { status, fault } => write!(f, "{fault} (exit status {status})"),
            Self::Signal(signal) => match Fault::of_signal(*signal) {
                Some(fault) => write!(f, "{fault} (signal {signal})"),
                None => write!(f, "signal {signal}"),
            },
            Self::MemoryCutShort => f.write_str(
                "the memory file of the snapshot that it went on from was cut short, which `imp template verify` finds",
            ),
            Self::OutOfMemory { limit_bytes } => {
                write!(f, "the kernel killed it at its memory limit of {} MiB", limit_bytes >> 20)
            }
            Self::Unknown => f.write_str("how is not known"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_vm_ended_reads_as_a_sentence_with_what_its_console_says_last() {
        let console =
            ["[    1.0] Kernel panic - not syncing: \u{1b}[31mno init", "", "  "].map(str::to_owned);
        let failed = |failure| Outcome::Failed { failure, console: console.to_vec() };
        let ended = failed(Failure::EndedInBoot { vmm: VmmEnd::Reset }).to_string();
        let said = r#"its console: "[    1.0] Kernel panic - not syncing: \u{1b}[31mno init""#;
        assert!(ended.starts_with("the machine ended while it booted") && ended.ends_with(said), "{ended}");
        assert!(!failed(Failure::OwnerGone).to_string().contains("panic"));
        let cut = failed(Failure::EndedWhileRunning { vmm: VmmEnd::Signal(7) }).to_string();
        assert!(cut.contains("memory that it needed is gone") && cut.contains("(signal 7)"), "{cut}");
        assert_eq!(VmmEnd::Signal(9).to_string(), "signal 9");
        let signalled = Outcome::Signalled { signal: 9, out_of_memory: true, timed_out: false };
        let text = "its program was ended by signal 9, because the guest ran out of memory";
        assert_eq!(signalled.to_string(), text);
    }
}
