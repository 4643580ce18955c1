//! What a machine has and what its VMs take of it, read from the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::admission::Machine;
use crate::id::VmId;
use crate::layout::{Layout, VmLayout};
use crate::metering::{self, Memory, Template};
use crate::status::Usage;

const KIB: u64 = 1 << 10;

/// A living VM in the books.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Commitment {
    pub memory: u64,
    pub scratch: u64,
    pub vmm_pid: Option<u32>,
}

/// The whole machine. What cannot be read counts as no bound.
pub(crate) fn machine(layout: &Layout, commitments: &[(VmId, Commitment)]) -> Machine {
    let outstanding =
        |(id, c): &(VmId, Commitment)| c.scratch.saturating_sub(allocated(&layout.vm(id).scratch()));
    let scratch_outstanding = commitments.iter().map(outstanding).sum();
    let commitments = commitments.iter().map(|(_, commitment)| commitment);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = field_kib(&meminfo, "MemTotal:").unwrap_or(u64::MAX);
    let available = field_kib(&meminfo, "MemAvailable:").unwrap_or(u64::MAX);
    let resident = commitments.clone().filter_map(|c| c.vmm_pid).map(resident_bytes).sum();
    let disk_available = rustix::fs::statvfs(layout.data())
        .map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize))
        .unwrap_or(u64::MAX);
    let cpus = std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
    let (limit, used) = crate::cgroup::own_memory().unwrap_or((u64::MAX, 0));
    Machine {
        memory_total: total.min(limit),
        memory_available: available.min(limit.saturating_sub(used)),
        memory_committed: commitments.clone().map(|c| c.memory).sum(),
        memory_resident: resident,
        cpus,
        disk_available,
        scratch_outstanding,
        threads_available: threads_available(),
        vms: u32::try_from(commitments.count()).unwrap_or(u32::MAX),
    }
}

/// Threads of the whole system are bounded by kernel.threads-max and kernel.pid_max.
fn threads_available() -> u64 {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let most = number("/proc/sys/kernel/threads-max")
        .unwrap_or(u64::MAX)
        .min(number("/proc/sys/kernel/pid_max").unwrap_or(u64::MAX));
    // Fourth field: runnable/all.
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running =
        load.split_whitespace().nth(3).and_then(|f| f.split_once('/')?.1.parse::<u64>().ok()).unwrap_or(0);
    most.saturating_sub(running)
}

/// What one VM takes; parts that cannot be read are zero, as when the VMM has just ended.
///
/// `template`: of the snapshot that the VM is made of. Its pages are shared, also while nobody else has touched them.
pub(crate) fn of_vm(vm: &VmLayout, vmm_pid: Option<u32>, template: Option<Template>) -> Usage {
    let read = |name: &str| {
        vmm_pid.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/{name}")).ok()).unwrap_or_default()
    };
    let rollup = read("smaps_rollup");
    let pages = Pages::parse(&rollup);
    // A line for each mapping is what it takes to tell a snapshot's pages from others.
    let (memory, only_here) = match template {
        None => (Memory::parse(&rollup, None), 0),
        Some(template) => {
            let smaps = read("smaps");
            (Memory::parse(&smaps, Some(template)), metering::only_here(&smaps, template))
        }
    };
    Usage {
        memory,
        cpu_nanoseconds: cpu_nanoseconds(&read("stat")).unwrap_or(0),
        resident_bytes: pages.resident,
        private_bytes: pages.private.saturating_sub(only_here),
        shared_bytes: pages.shared + only_here,
        proportional_bytes: pages.proportional,
        scratch_bytes: allocated(&vm.scratch()),
        log_bytes: allocated(&vm.console())
            + allocated(&vm.earlier_console())
            + fs::read_dir(vm.logs())
                .into_iter()
                .flatten()
                .flatten()
                .map(|e| allocated(&e.path()))
                .sum::<u64>(),
    }
}

/// Memory of a process, in bytes, as the kernel sums it up over all its mappings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Pages {
    resident: u64,
    /// Mapped by this process alone.
    private: u64,
    /// Mapped by others, too.
    shared: u64,
    /// Each page by the number of those who map it.
    proportional: u64,
}

impl Pages {
    /// From the format of /proc/PID/smaps_rollup; a field that is not there is zero.
    fn parse(rollup: &str) -> Self {
        let bytes = |field: &str| field_kib(rollup, field).unwrap_or(0);
        Self {
            resident: bytes("Rss:"),
            private: bytes("Private_Clean:") + bytes("Private_Dirty:") + bytes("Private_Hugetlb:"),
            shared: bytes("Shared_Clean:") + bytes("Shared_Dirty:") + bytes("Shared_Hugetlb:"),
            proportional: bytes("Pss:"),
        }
    }
}

/// Value of a "Name:  123 kB" line, in bytes.
fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(KIB)
}

/// Resident pages, from /proc/PID/statm: cheaper than smaps for many VMs at once.
fn resident_bytes(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// Fields 14 and 15 of /proc/PID/stat: user and system time in clock ticks.
fn cpu_nanoseconds(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    Some((user + system).saturating_mul(tick))
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_the_kernel_s_texts() {
        assert_eq!(field_kib("Rss:     12 kB\nPss:  3 kB\n", "Pss:"), Some(3 << 10));
        assert_eq!(field_kib("Rss: x", "Rss:"), None);
        let stat = "1 (a b) c) S 0 0 0 0 0 0 0 0 0 0 5 7 0 0";
        let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second();
        assert_eq!(cpu_nanoseconds(stat), Some(12 * tick));
    }

    #[test]
    fn pages_are_private_or_shared_and_huge_ones_count() {
        let rollup = "55d0-7ffc ---p 00000000 00:00 0 [rollup]\nRss:  100 kB\nPss:  70 kB\nPss_Anon:  1 kB\n\
            Shared_Clean:  30 kB\nShared_Dirty:  10 kB\nPrivate_Clean:  20 kB\nPrivate_Dirty:  40 kB\n\
            Shared_Hugetlb:  2048 kB\nPrivate_Hugetlb:  4096 kB\n";
        assert_eq!(
            Pages::parse(rollup),
            Pages { resident: 100 << 10, private: 4156 << 10, shared: 2088 << 10, proportional: 70 << 10 }
        );
        assert_eq!(Pages::parse(""), Pages::default());
    }

    #[test]
    fn pages_that_two_processes_have_are_shared() {
        // Everybody has the C library's.
        let pages = Pages::parse(&fs::read_to_string("/proc/self/smaps_rollup").unwrap());
        assert!(pages.private > 0 && pages.shared > 0, "{pages:?}");
        assert!(pages.proportional < pages.resident, "{pages:?}");
    }

    #[test]
    fn the_running_process_has_pages_and_time() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::new(directory.path().into(), directory.path().join("run"));
        let vm = layout.vm(&crate::VmId::from_random([1; 8]));
        let usage = of_vm(&vm, Some(std::process::id()), None);
        assert!(usage.memory.resident > 0 && usage.memory.private_dirty > 0);
        assert!(usage.resident_bytes > 1 << 20 && usage.private_bytes <= usage.resident_bytes);
        assert_eq!(usage.private_bytes + usage.shared_bytes, usage.resident_bytes);
        let commitment = Commitment { memory: 5, scratch: 7, vmm_pid: Some(std::process::id()) };
        let machine = machine(&layout, &[(VmId::from_random([1; 8]), commitment)]);
        assert_eq!(machine.scratch_outstanding, 7);
        assert_eq!((machine.memory_committed, machine.vms), (5, 1));
        assert!(machine.memory_resident > 1 << 20 && machine.memory_available <= machine.memory_total);
        assert!(machine.disk_available > 0 && machine.threads_available > 0);
    }
}
