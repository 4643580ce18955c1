//! What Firecracker's exit status says; it also exits by itself, with a status of its own, on signals of the kernel.

use crate::status::{Fault, VmmEnd};

/// `FcExitCode` in src/vmm/src/lib.rs of Firecracker. 0, 1 and 2 say nothing that its log does not say better.
pub(super) fn told(end: VmmEnd) -> VmmEnd {
    let VmmEnd::Exit(status) = end else { return end };
    let fault = match status {
        148 => Fault::ForbiddenCall,
        149 => Fault::MemoryGone,
        150 => Fault::BadAccess,
        151 => Fault::FileTooLarge,
        152 => Fault::BadConfiguration,
        153 => Fault::BadArguments,
        154 => Fault::ProcessorTimeUp,
        155 => Fault::NobodyReads,
        156 => Fault::HungUp,
        157 => Fault::BadInstruction,
        _ => return end,
    };
    VmmEnd::Fault { status, fault }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_status_of_firecracker_s_own_reads_as_a_sentence() {
        let mut said = std::collections::BTreeSet::new();
        for status in 148..=157 {
            let end = told(VmmEnd::Exit(status));
            assert!(matches!(end, VmmEnd::Fault { status: kept, .. } if kept == status), "{end:?}");
            let text = end.to_string();
            assert!(text.ends_with(&format!(" (exit status {status})")), "{text}");
            assert!(said.insert(text), "{end:?} is said twice");
        }
        let gone = told(VmmEnd::Exit(149)).to_string();
        assert!(gone.contains("a file that it maps was cut short or could not be read, or this"), "{gone}");
    }

    #[test]
    fn what_else_a_process_ends_with_stays_what_it_is() {
        for end in [VmmEnd::Exit(0), VmmEnd::Exit(1), VmmEnd::Exit(147), VmmEnd::Exit(158), VmmEnd::Signal(9)]
        {
            assert_eq!(told(end), end);
        }
    }
}
