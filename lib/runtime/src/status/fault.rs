//! What a VMM did that it was ended for, or ended itself for.

use std::fmt;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    ForbiddenCall,
    /// It used memory that is behind the end of the file which it maps there, that could not be read or given room, or that is
    /// broken.
    MemoryGone,
    BadAccess,
    BadInstruction,
    FileTooLarge,
    ProcessorTimeUp,
    NobodyReads,
    HungUp,
    BadConfiguration,
    BadArguments,
}

/// Half a sentence.
impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::ForbiddenCall => "it made a system call that its filter forbids",
            Self::MemoryGone => {
                "memory that it needed is gone: a file that it maps was cut short or could not be read, or this machine's memory is broken"
            }
            Self::BadAccess => "it used memory that it does not have",
            Self::BadInstruction => "it met an instruction that this processor does not know",
            Self::FileTooLarge => "a file of it became larger than files may be here (`ulimit -f`)",
            Self::ProcessorTimeUp => "it has used all processor time that it may (`ulimit -t`)",
            Self::NobodyReads => "nobody read any more what it wrote",
            Self::HungUp => "it was hung up on",
            Self::BadConfiguration => "it does not take this configuration of a machine",
            Self::BadArguments => "it does not take its arguments",
        })
    }
}

impl Fault {
    /// What a signal that the kernel sends means. Others say no more than their number.
    pub(super) fn of_signal(signal: i32) -> Option<Self> {
        [
            (Signal::SYS, Self::ForbiddenCall),
            (Signal::BUS, Self::MemoryGone),
            (Signal::SEGV, Self::BadAccess),
            (Signal::ILL, Self::BadInstruction),
            (Signal::XFSZ, Self::FileTooLarge),
            (Signal::XCPU, Self::ProcessorTimeUp),
        ]
        .into_iter()
        .find_map(|(sent, fault)| (sent.as_raw() == signal).then_some(fault))
    }
}
