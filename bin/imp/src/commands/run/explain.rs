//! Why a VM failed, in words, and with the end of its console where that says more.

use imp_runtime::status::{Failure, Outcome, VmStatus};

use crate::output;

/// What is on the console of every machine, good or bad: the kernel that finds no PCI bus, QEMU that waits for its
/// owner, and the processor features that emulation lacks.
const NOISE: [&str; 3] = [
    "PCI: Fatal: No config space access function found",
    "QEMU waiting for connection on:",
    "TCG doesn't support requested feature",
];

pub(crate) fn explain(status: &VmStatus) {
    match &status.outcome {
        Some(Outcome::Failed { failure, console }) => {
            output::complain(&format!("{}: {failure}", status.name));
            for line in telling(failure, console) {
                output::say(&format!("  | {}", output::printable(line)));
            }
        }
        Some(Outcome::NotStarted { why, .. }) => {
            output::complain(&format!("{}: the program could not be started: {why}", status.name));
        }
        Some(Outcome::Exited { .. } | Outcome::Signalled { .. } | Outcome::Killed | Outcome::PoweredOff)
        | None => {}
    }
}

/// The lines of the console that explain the failure.
fn telling<'a>(failure: &Failure, console: &'a [String]) -> Vec<&'a str> {
    if !failure.is_on_console() {
        return Vec::new();
    }
    let noise = |line: &&str| NOISE.iter().any(|noise| line.contains(noise));
    console.iter().map(String::as_str).filter(|line| !noise(line)).collect()
}

#[cfg(test)]
mod tests {
    use imp_runtime::status::VmmEnd;

    use super::*;

    #[test]
    fn a_panic_is_shown_without_what_every_console_says() {
        let console = [
            "[    0.1] PCI: Fatal: No config space access function found",
            "[    1.0] Kernel panic - not syncing: no init",
            "qemu-system-x86_64: info: QEMU waiting for connection on: disconnected:unix:/run/x,server=on",
        ]
        .map(str::to_owned);
        let panic = Failure::EndedInBoot { vmm: VmmEnd::Reset };
        assert_eq!(telling(&panic, &console), ["[    1.0] Kernel panic - not syncing: no init"]);
        assert!(telling(&Failure::Setup { detail: "no such user".into() }, &console).is_empty());
    }
}
