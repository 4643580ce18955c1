//! Decides whether the machine can hold one more VM: refused with numbers, rather than killed later.

use serde::Serialize;

const MIB: u64 = 1 << 20;
/// What is left to everything else on the machine.
const MEMORY_RESERVE: u64 = 256 * MIB;
const DISK_RESERVE: u64 = 256 * MIB;
const PROCESS_RESERVE: u64 = 256;
/// Threads of one VMM beside its processors.
pub(crate) const VMM_THREADS: u64 = 32;

/// A machine that is made of a snapshot shares what it does not write with all others made of it. Most write less than
/// this part of their memory; what they write beyond it is seen as taken when the next one comes.
const PRIVATE_SHARE: u64 = 4;

/// What a guest of so much memory, made of a snapshot, is expected to have for itself.
pub(crate) fn private_estimate(memory: u64) -> u64 {
    memory / PRIVATE_SHARE
}

/// What the machine has and what is promised to VMs, in bytes where nothing else is said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Of the machine, or of the control group that bounds this process, whichever is less.
    pub memory_total: u64,
    /// Free for new programs now, as the kernel estimates it.
    pub memory_available: u64,
    /// Promised to living VMs, their VMMs' own need included.
    pub memory_committed: u64,
    /// The part of what is promised that has been taken up.
    pub memory_resident: u64,
    pub cpus: u32,
    /// Free space of the file system that holds scratch disks.
    pub disk_available: u64,
    /// What the scratch disks of living VMs may still take of it. Space is promised more than once, because few disks
    /// grow to their full size and a full one is an error for one program, not the end of a VM.
    pub scratch_outstanding: u64,
    /// Threads that may still be started.
    pub threads_available: u64,
    pub vms: u32,
}

/// What a VM needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// The guest's memory and the VMM's own.
    pub memory: u64,
    pub cpus: u32,
    pub scratch: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "not enough memory: the VM needs {} MiB with its monitor; of {} MiB, {} MiB are promised to {vms} running VMs and \
         {} MiB are kept for the host: use less with -m, or stop a VM", need / MIB, total / MIB, committed / MIB,
         MEMORY_RESERVE / MIB
    )]
    MemoryPromised { need: u64, total: u64, committed: u64, vms: u32 },
    #[error(
        "not enough free memory: the VM needs {} MiB with its monitor; {} MiB are free now, and running VMs may still take \
         {} MiB of that: use less with -m, or end other programs", need / MIB, available / MIB, outstanding / MIB
    )]
    MemoryTaken { need: u64, available: u64, outstanding: u64 },
    #[error("{wanted} processors wanted, the machine has {cpus}: use --cpus {cpus}")]
    Cpus { wanted: u32, cpus: u32 },
    #[error(
        "not enough disk space: a scratch disk of {} MiB may grow past the {} MiB that are free, of which {} MiB are kept for \
         the host and running VMs may still take {} MiB: use less with --disk, or free some with `imp prune`",
         scratch / MIB, available / MIB, DISK_RESERVE / MIB, outstanding / MIB
    )]
    Disk { scratch: u64, available: u64, outstanding: u64 },
    #[error("not enough processes: the VM needs {need} threads, {available} may still be started")]
    Threads { need: u64, available: u64 },
}

impl Machine {
    pub fn admit(&self, need: Need) -> Result<(), Refusal> {
        let promised = self.memory_committed.saturating_add(need.memory).saturating_add(MEMORY_RESERVE);
        if promised > self.memory_total {
            return Err(Refusal::MemoryPromised {
                need: need.memory,
                total: self.memory_total,
                committed: self.memory_committed,
                vms: self.vms,
            });
        }
        let outstanding = self.memory_committed.saturating_sub(self.memory_resident);
        if need.memory.saturating_add(outstanding).saturating_add(MEMORY_RESERVE) > self.memory_available {
            return Err(Refusal::MemoryTaken {
                need: need.memory,
                available: self.memory_available,
                outstanding,
            });
        }
        if need.cpus > self.cpus {
            return Err(Refusal::Cpus { wanted: need.cpus, cpus: self.cpus });
        }
        if need.scratch.saturating_add(DISK_RESERVE) > self.disk_available {
            return Err(Refusal::Disk {
                scratch: need.scratch,
                available: self.disk_available,
                outstanding: self.scratch_outstanding,
            });
        }
        let threads = u64::from(need.cpus) + VMM_THREADS;
        if threads + PROCESS_RESERVE > self.threads_available {
            return Err(Refusal::Threads { need: threads, available: self.threads_available });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine() -> Machine {
        Machine {
            memory_total: 8 * GIB,
            memory_available: 6 * GIB,
            memory_committed: 0,
            memory_resident: 0,
            cpus: 4,
            disk_available: 20 * GIB,
            scratch_outstanding: 0,
            threads_available: 10_000,
            vms: 0,
        }
    }

    fn need() -> Need {
        Need { memory: GIB, cpus: 1, scratch: 4 * GIB }
    }

    #[test]
    fn what_fits_is_admitted_and_what_does_not_is_refused_by_its_first_shortage() {
        assert_eq!(machine().admit(need()), Ok(()));
        let promised = Machine { memory_committed: 7 * GIB, memory_resident: 7 * GIB, vms: 7, ..machine() };
        assert!(matches!(promised.admit(need()), Err(Refusal::MemoryPromised { vms: 7, .. })));
        let taken = Machine { memory_available: GIB, ..machine() };
        assert!(matches!(taken.admit(need()), Err(Refusal::MemoryTaken { outstanding: 0, .. })));
        let outstanding = Machine { memory_committed: 5 * GIB, memory_resident: 0, ..machine() };
        assert!(matches!(outstanding.admit(need()), Err(Refusal::MemoryTaken { .. })));
        let taken_up = Machine { memory_committed: 5 * GIB, memory_resident: 5 * GIB, ..machine() };
        assert_eq!(taken_up.admit(need()), Ok(()));
        assert!(matches!(machine().admit(Need { cpus: 5, ..need() }), Err(Refusal::Cpus { cpus: 4, .. })));
        assert!(matches!(machine().admit(Need { scratch: 20 * GIB, ..need() }), Err(Refusal::Disk { .. })));
        // Disks may be promised more than once; the refusal tells how much.
        let disks = Machine { scratch_outstanding: 19 * GIB, ..machine() };
        assert_eq!(disks.admit(need()), Ok(()));
        let refusal = disks.admit(Need { scratch: 20 * GIB, ..need() }).unwrap_err().to_string();
        assert!(refusal.contains("19456 MiB") && refusal.contains("256 MiB are kept"), "{refusal}");
        let threads = Machine { threads_available: 280, ..machine() };
        assert!(matches!(threads.admit(need()), Err(Refusal::Threads { need: 33, available: 280 })));
        assert!(machine().admit(Need { memory: u64::MAX, ..need() }).is_err());
    }

    #[test]
    fn many_more_vms_of_a_snapshot_are_admitted_than_could_all_be_written_to() {
        let memory = 256 * MIB;
        let need = Need { memory: private_estimate(memory) + 16 * MIB, cpus: 1, scratch: GIB };
        let mut machine = Machine { memory_available: 8 * GIB, ..machine() };
        while machine.admit(need).is_ok() {
            machine.memory_committed += need.memory;
            machine.vms += 1;
        }
        assert!(machine.vms >= 50, "{}", machine.vms);
        assert!(u64::from(machine.vms) * memory > machine.memory_total);
    }

    #[test]
    fn a_refusal_has_numbers_and_says_what_to_do() {
        let text = Machine { memory_available: GIB, ..machine() }.admit(need()).unwrap_err().to_string();
        assert!(text.contains("1024 MiB") && text.contains("-m"), "{text}");
    }
}
